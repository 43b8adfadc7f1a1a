"""A rank's part of a model: its pipeline stage and its share of the heads, experts and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.positions import RotaryPositions
from ascend_run.ops.generation.step import Step

from .latents import LatentModel
from .lean import LeanModel

if TYPE_CHECKING:
    from ascend_run.core.model.gpt import GPT
    from ascend_run.plugin_api.contracts import ModelBundle, RunContext

# T tokens of a step, R rows whose logits are wanted, V vocabulary


@attrs.define(eq=False)
class Stage:
    """Computes steps, at the same time as the other ranks of its replica."""

    bundle: ModelBundle
    context: RunContext
    forward: CachedForward
    lean: LeanModel
    latents: LatentModel
    positions: RotaryPositions | None = None  #: None: the model has no rotary positions.

    @property
    def chunk(self) -> GPT:
        """The layers of this rank."""
        (chunk,) = self.bundle.chunks
        model: Any = chunk
        return model  # type: ignore[no-any-return]

    def logits(self, step: Step) -> Tensor | None:
        """Compute a step: the logits [R, V] of its wanted rows, on the last stage's ranks."""
        tables = None if self.positions is None else self.positions.tables(step)
        tokens_1T, positions_1T = step.tokens_T[None], step.positions_T[None]
        if self.context.config.parallel.sequence_parallel:  # the ranks' shares have one length
            extra = -len(step.tokens_T) % self.context.groups.tp.size()
            tokens_1T, positions_1T = (F.pad(row, (0, extra)) for row in (tokens_1T, positions_1T))
            tables = None if tables is None else F.pad(tables, (0, 0, 0, extra))

        def of_chunk(model: nn.Module) -> Tensor:
            out: Tensor = model(tokens_1T, positions_1T, rotary_pos_emb=tables)
            return out

        with self.forward.running(step), torch.no_grad():
            if self.context.groups.pp.size() == 1:
                return self._gathered(of_chunk(self.chunk)[0])
            results = self._through_stages(of_chunk, tokens_1T.shape[1])
        return self._gathered(results[0][0]) if results else None

    def _through_stages(self, of_chunk: Any, num_tokens: int) -> list[Tensor]:
        """Run Megatron's pipeline schedule; only the last stage has a result."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        groups = self.context.groups
        results: list[Tensor] = get_forward_backward_func()(
            forward_step_func=lambda data, model: (of_chunk(model), None),
            data_iterator=[None],
            model=self.bundle.chunks,
            num_microbatches=1,
            seq_length=num_tokens,
            micro_batch_size=1,
            forward_only=True,
            pg_collection=groups,
            p2p_communicator=P2PCommunicator(groups.pp, self.bundle.transformer_config),
        )
        return results

    def _gathered(self, logits_RV: Tensor) -> Tensor:
        """Join the vocabulary's shards; the padding is after all real tokens."""
        group = self.context.groups.tp
        if group.size() == 1:
            return logits_RV
        width = self.chunk.output_layer.output_size_per_partition
        padded = logits_RV.new_zeros(len(logits_RV), width)
        padded[:, : logits_RV.shape[1]] = logits_RV
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, -1)[:, : self.context.config.model.vocab_size]
