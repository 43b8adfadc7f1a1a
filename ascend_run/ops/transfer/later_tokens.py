"""The fields of a batch some tokens later, over context-parallel ranks and within documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ascend_run.types.attention import SequencePartition, full_length, partition_of

# S sequence on this rank, B micro-batch, L full sequence


def later_tokens(
    fields: Mapping[str, Tensor],
    depths: int,
    document_ends: tuple[int, ...] | None,
    partition: SequencePartition | None,
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
    partition: SequencePartition | None,
    cp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return the positions of this rank's tokens, [S], and the full fields, [fields, B, L]."""
    local = torch.stack([field.double() for field in fields.values()])
    rank, size = cp_group.rank(), cp_group.size()
    if partition is None or size == 1:
        return torch.arange(local.shape[-1], device=local.device), local
    length = full_length(partition, local.shape[-1], rank, size)
    of_batch = partition_of(partition, document_ends)
    held = [
        torch.cat([torch.arange(*chunk) for chunk in of_batch.chunks(length, each, size)])
        for each in range(size)
    ]
    longest = max(map(len, held))
    padded = F.pad(local, (0, longest - local.shape[-1])).contiguous()
    shards = [torch.empty_like(padded) for _ in held]
    dist.all_gather(shards, padded, group=cp_group)
    full = local.new_empty(*local.shape[:-1], length)
    for positions, shard in zip(held, shards, strict=True):
        full[..., positions.to(local.device)] = shard[..., : len(positions)]
    return held[rank].to(local.device), full
