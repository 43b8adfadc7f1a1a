"""Collectives whose parts have unequal numbers of rows, for a backend that needs equal ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def padded_all_gather(plain: Any) -> Any:
    """Return a function that calls ``torch.distributed.all_gather``, and pads unequal parts."""

    def all_gather(
        tensor_list: list[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        rows = [output.shape[0] if output.dim() else 1 for output in tensor_list]
        if len(set(rows)) == 1:
            return plain(tensor_list, tensor, group=group, async_op=async_op)
        most = max(rows)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        plain(gathered, padded, group=group)
        for output, whole in zip(tensor_list, gathered, strict=True):
            output.copy_(whole[: output.shape[0]])
        return None

    return all_gather


def padded_reduce_scatter(plain: Any) -> Any:
    """Return a function that calls ``torch.distributed.reduce_scatter``, and pads unequal parts."""

    def reduce_scatter(
        output: Tensor,
        input_list: list[Tensor],
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        rows = [part.shape[0] if part.dim() else 1 for part in input_list]
        if len(set(rows)) == 1:
            return plain(output, input_list, op=op, group=group, async_op=async_op)
        padded = [part.new_zeros((max(rows), *part.shape[1:])) for part in input_list]
        for whole, part in zip(padded, input_list, strict=True):
            whole[: part.shape[0]] = part
        sums = torch.empty_like(padded[0])
        plain(sums, padded, op=op, group=group)
        output.copy_(sums[: output.shape[0]])
        return None

    return reduce_scatter
