"""Multi-token prediction: extra layers that predict tokens further ahead, in training only.

Depth k predicts token i + k + 1 at position i: from the hidden state of depth k - 1, the embedding
of token i + k, one transformer layer, and the output layer of the model. Depth 0 is the model.
Source: arXiv:2412.19437, section 2.2; parameters and names are Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ascend_run.plugin_api import contracts as c

from .assembly import Assembly
from .spec import last_layer_spec, norm_spec

if TYPE_CHECKING:
    from collections.abc import Callable

# S sequence on this rank, B micro-batch, H hidden size, L full sequence


def mtp_spec(
    config: TransformerConfig, assembly: Assembly
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return one layer for each depth, like the model's last layer; None without depths."""
    if not config.mtp_num_layers:
        return None
    norm = norm_spec(assembly)
    layer = ModuleSpec(
        module=MTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=last_layer_spec(config, assembly),
            layer_norm=norm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's layer of one depth; its token ids come shifted.

    Megatron shifts them inside, which supports one sequence sharding.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        embedding: Callable[[Tensor, Tensor | None], Tensor],
        hidden_states: Tensor,
        packed_seq_params: object = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return input_ids, position_ids, embedding(input_ids, position_ids), hidden_states

    def _checkpointed_forward(
        self,
        forward_func: Callable[..., Tensor],
        *,
        hidden_states: Tensor,
        decoder_input: Tensor,
        **others: Any,
    ) -> Tensor:
        # Megatron would save every argument as a tensor.
        out: Tensor = tensor_parallel.checkpoint(
            partial(forward_func, **others),
            self.config.distribute_saved_activations,
            hidden_states,
            decoder_input,
        )
        return out


def shifted_batches(
    fields: Mapping[str, Tensor],
    depths: int,
    document_ends: tuple[int, ...] | None,
    partition: c.SequencePartition | None,
    cp_group: dist.ProcessGroup,
) -> Iterator[dict[str, Tensor]]:
    """Yield the fields of a batch shifted by 1, 2, ... tokens within each document.

    A position whose token would lie behind the end of its document gets 0 in every field, so also
    in the loss mask.

    Args:
        fields: [B, S] each, this rank's shard. Values are exact in float64.
        document_ends: Where documents end in the full sequence.
    """
    positions, full = _gathered(fields, document_ends, partition, cp_group)
    length = full.shape[-1]
    ends = torch.tensor(sorted({*(document_ends or ()), length}), device=full.device)
    end_S = ends[torch.searchsorted(ends, positions, right=True)]
    for depth in range(1, depths + 1):
        taken = (positions + depth).clamp(max=length - 1)
        rows = full[..., taken] * (positions + depth < end_S)
        yield {
            name: row.to(field.dtype)
            for (name, field), row in zip(fields.items(), rows, strict=True)
        }


def _gathered(
    fields: Mapping[str, Tensor],
    document_ends: tuple[int, ...] | None,
    partition: c.SequencePartition | None,
    cp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return the positions of this rank's tokens, [S], and the full fields, [fields, B, L]."""
    local = torch.stack([field.double() for field in fields.values()])
    rank, size = cp_group.rank(), cp_group.size()
    if partition is None or size == 1:
        return torch.arange(local.shape[-1], device=local.device), local
    length = c.full_length(partition, local.shape[-1], rank, size)
    of_batch = c.partition_of(partition, document_ends)
    held = [
        torch.cat([torch.arange(*chunk) for chunk in of_batch.chunks(length, each, size)])
        for each in range(size)
    ]
    longest = max(map(len, held))
    padded = torch.nn.functional.pad(local, (0, longest - local.shape[-1])).contiguous()
    shards = [torch.empty_like(padded) for _ in held]
    dist.all_gather(shards, padded, group=cp_group)
    full = local.new_empty(*local.shape[:-1], length)
    for positions, shard in zip(held, shards, strict=True):
        full[..., positions.to(local.device)] = shard[..., : len(positions)]
    return held[rank].to(local.device), full
