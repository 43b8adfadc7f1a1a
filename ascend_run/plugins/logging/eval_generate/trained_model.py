"""Steps of generation by the model of a run, with each rank's part of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.step import Step
from ascend_run.ops.generation.text_lengths import TextLengths
from ascend_run.plugin_api import ModelBundle, RunContext

# T tokens of a step, R rows whose logits are wanted, V vocabulary, H hidden size


class TrainedModel:
    """Computes the same steps on all ranks at the same time.

    Data- and context-parallel ranks compute the same tokens, so that experts on other ranks have
    what they exchange. All get the logits of one rank, so all choose the same tokens.
    """

    def __init__(
        self,
        context: RunContext,
        bundle: ModelBundle,
        forward: CachedForward,
        lengths: TextLengths,
    ) -> None:
        self._context, self._bundle = context, bundle
        self._forward, self._lengths = forward, lengths
        self._device, self._groups = context.device.torch_device, context.groups

    def logits(self, step: Step) -> Tensor:
        """Compute a step: the logits [R, V] of its wanted rows, in the host's memory."""
        step = attrs.evolve(
            step,
            tokens_T=step.tokens_T.to(self._device),
            positions_T=step.positions_T.to(self._device),
            rows_R=step.rows_R.to(self._device),
        )
        own_RV = None
        with self._forward.running(step), torch.no_grad():
            if (logits_TV := self._through_chunks(step)) is not None:
                own_RV = self._gathered(logits_TV.index_select(0, step.rows_R))
        return self._of_one_rank(own_RV, len(step.rows_R)).cpu()

    def _through_chunks(self, step: Step) -> Tensor | None:
        """Run the chunks of all pipeline stages in turn; the last stage has the logits [T, V]."""
        arguments, length = self._arguments(step)
        pp, chunks = self._groups.pp, self._bundle.chunks
        is_first, is_last = pp.rank() == 0, pp.rank() == pp.size() - 1
        out_1TV = None
        for number, chunk in enumerate(chunks):
            if not (is_first and number == 0):
                take = get_attr_wrapped_model(chunk, "set_input_tensor")
                take(self._received(length))
                out = chunk(**arguments)
                take(None)
            else:
                out = chunk(**arguments)
            if is_last and number == len(chunks) - 1:
                out_1TV = out
            else:
                dist.send(out.contiguous(), self._rank_of_stage(1), group=pp)
        return None if out_1TV is None else out_1TV[0]

    def _arguments(self, step: Step) -> tuple[dict[str, Any], int]:
        """Return the arguments of a chunk, and how many of the tokens this rank has in between."""
        tokens_1T, positions_1T = step.tokens_T[None], step.positions_T[None]
        tables, size = self._tables(step), self._groups.tp.size()
        length = tokens_1T.shape[1]
        if self._context.config.parallel.sequence_parallel:  # the ranks' shares have one length
            extra = -length % size
            tokens_1T, positions_1T = (F.pad(row, (0, extra)) for row in (tokens_1T, positions_1T))
            tables = None if tables is None else F.pad(tables, (0, 0, 0, extra))
            length = (length + extra) // size
        arguments = {
            "input_ids": tokens_1T,
            "position_ids": positions_1T,
            "rotary_pos_emb": tables,
        }
        return arguments, length

    def _tables(self, step: Step) -> Tensor | None:
        """Return the rotary tables of the step's tokens; the model's own ones stay as they are."""
        rotary: Any = get_attr_wrapped_model(self._bundle.chunks[0], "rotary")
        if rotary is None:
            return None
        parts = [
            rotary.at(step.positions_T[part.rows].cpu(), self._lengths.counted(part.length))
            for part in step.parts
        ]
        dtype = self._bundle.transformer_config.params_dtype
        return torch.cat(parts, -2).to(device=self._device, dtype=dtype)

    def _received(self, length: int) -> Tensor:
        config = self._bundle.transformer_config
        shape = (length, 1, config.hidden_size)
        hidden_T1H = torch.empty(shape, dtype=config.pipeline_dtype, device=self._device)
        dist.recv(hidden_T1H, self._rank_of_stage(-1), group=self._groups.pp)
        return hidden_T1H

    def _rank_of_stage(self, after: int) -> int:
        pp = self._groups.pp
        return dist.get_global_rank(pp, (pp.rank() + after) % pp.size())

    def _gathered(self, logits_RV: Tensor) -> Tensor:
        """Join the vocabulary's shards; the padding is after all real tokens."""
        group = self._groups.tp
        if group.size() == 1:
            return logits_RV
        output: Any = get_attr_wrapped_model(self._bundle.chunks[-1], "output_layer")
        padded = logits_RV.new_zeros(len(logits_RV), output.output_size_per_partition)
        padded[:, : logits_RV.shape[1]] = logits_RV
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, -1)[:, : self._context.config.model.vocab_size]

    def _of_one_rank(self, own_RV: Tensor | None, num_rows: int) -> Tensor:
        """Return the logits of the first rank of the last stage."""
        layout, config = self._context.layout, self._bundle.transformer_config
        if layout.world_size == 1:
            assert own_RV is not None
            return own_RV
        last = layout.pp - 1
        ranks = range(layout.world_size)
        source = next(rank for rank in ranks if layout.coordinate("pp", rank) == last)
        dtype = torch.promote_types(config.params_dtype, torch.float32)
        shape = (num_rows, self._context.config.model.vocab_size)
        if layout.rank == source:
            assert own_RV is not None
            shared_RV = own_RV.to(dtype).contiguous()
        else:
            shared_RV = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(shared_RV, source)
        return shared_RV


@contextmanager
def evaluating(bundle: ModelBundle) -> Iterator[None]:
    """Set the chunks to evaluation, with their weights complete, and afterwards back to their
    modes."""
    chunks: list[Any] = [*bundle.chunks]
    trains = [chunk.training for chunk in chunks]
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):  # gathers its weights in the next forward
            chunk.start_param_sync(force_sync=True)
        chunk.eval()
    try:
        with _uncompiled():
            yield
    finally:
        for chunk, was_training in zip(chunks, trains, strict=True):
            chunk.train(was_training)


def _uncompiled() -> Any:
    """Return a context in which compiled modules run as they are: each length of a step would be
    compiled. Where Dynamo has not been imported there are none."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
