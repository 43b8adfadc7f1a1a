"""Matmuls with a collective before or after them, and those that run one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from .wide_matmul import Matmul

Group: TypeAlias = dist.ProcessGroup


@attrs.frozen(kw_only=True)
class CollectiveMatmuls:
    """Matmuls with their collective: ``(rows, matrix [in, out], group)``."""

    all_gather_matmul: Callable[[Tensor, Tensor, Group], tuple[Tensor, Tensor]]
    """Returns all ranks' rows times the matrix, and those rows."""
    matmul_reduce_scatter: Callable[[Tensor, Tensor, Group], Tensor]
    """Returns this rank's rows of the sum of all ranks' matmuls."""
    matmul_all_reduce: Callable[[Tensor, Tensor, Group], Tensor]


@functools.cache
def plain_matmuls(matmul: Matmul) -> CollectiveMatmuls:
    """Run collective and matmul one after the other, as Megatron does."""

    def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        gathered, work = start_gather(x, group)
        work.wait()
        return matmul(gathered, matrix), gathered

    def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
        out, work, _ = start_reduce_scatter(matmul(x, matrix), group)
        work.wait()
        return out

    def matmul_all_reduce(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
        product = matmul(x, matrix)
        dist.all_reduce(product, group=group)
        return product

    return CollectiveMatmuls(
        all_gather_matmul=all_gather_matmul,
        matmul_reduce_scatter=matmul_reduce_scatter,
        matmul_all_reduce=matmul_all_reduce,
    )


PLAIN: Final = plain_matmuls(torch.mm)


def start_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """Start an all-gather of rows; they are there when the work is done."""
    gathered = x.new_empty(group.size() * x.shape[0], x.shape[1])
    work = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)
    return gathered, work


def start_reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, dist.Work, Tensor]:
    """Start a reduce-scatter; keep the returned input alive until the work is done."""
    out = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=True), x
