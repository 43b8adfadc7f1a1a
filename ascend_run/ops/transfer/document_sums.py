"""Sums of values per token over the documents of a packed sequence."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ascend_run.ops.autograd_function import Function

# S sequence on this rank, B micro-batch, D documents


def document_sums(
    values_BS: Tensor,
    documents_BS: Tensor,
    num_documents: int,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the sum of each document, [D], in the dtype of the values.

    With context parallelism every rank gets the sums over all ranks. If every rank then computes
    the same loss from them, its backward reaches the values of its own tokens once; the sum of
    gradients over context-parallel ranks is that of the loss.

    Args:
        documents_BS: Index of each token's document, int64.
    """
    zeros_D = values_BS.new_zeros(num_documents)
    sums_D = zeros_D.index_add(0, documents_BS.flatten(), values_BS.flatten())
    if cp_group is None or cp_group.size() == 1:
        return sums_D
    out: Tensor = _SumOverRanks.apply(sums_D, cp_group)
    return out


class _SumOverRanks(Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
