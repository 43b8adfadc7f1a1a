"""Matmuls in slices of the rows: the collective of one slice overlaps with the next matmul.

Source: MindSpeed's CoC, communication over computation.
"""

# T rows of one rank, P ranks of the group, K inner and N outer width

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from .wide_matmul import Matmul


def slices(rows: int, number: int) -> Iterator[slice]:
    """Yield nearly equal ranges of rows, none of them empty."""
    number = max(1, min(number, rows))
    for index in range(number):
        yield slice(index * rows // number, (index + 1) * rows // number)


def all_gather_matmul(
    x_TK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> tuple[Tensor, Tensor]:
    """Return all ranks' rows times the matrix, [P * T, N], and all ranks' rows [P * T, K], by rank.

    A gathered slice is ordered [rank][row of the slice] and is copied to its ranks' rows.
    """
    size, (rows, inner) = group.size(), x_TK.shape
    x_TK = x_TK.contiguous()
    product = x_TK.new_empty(size, rows, matrix_KN.shape[1])
    gathered = x_TK.new_empty(size, rows, inner)
    pending = []
    for part in slices(rows, number):
        buffer = x_TK.new_empty(size * (part.stop - part.start), inner)
        work = dist.all_gather_into_tensor(buffer, x_TK[part], group=group, async_op=True)
        pending.append((part, buffer, work))
        if len(pending) > 1:  # one all-gather overlaps with the previous matmul
            _multiply(*pending.pop(0), matrix_KN, product, gathered, matmul)
    _multiply(*pending.pop(), matrix_KN, product, gathered, matmul)
    return product.flatten(0, 1), gathered.flatten(0, 1)


def _multiply(
    part: slice,
    buffer: Tensor,
    work: dist.Work,
    matrix_KN: Tensor,
    product_PTN: Tensor,
    gathered_PTK: Tensor,
    matmul: Matmul,
) -> None:
    work.wait()
    size = product_PTN.shape[0]
    gathered_PTK[:, part] = buffer.view(size, -1, buffer.shape[1])
    product_PTN[:, part] = matmul(buffer, matrix_KN).view(size, -1, matrix_KN.shape[1])


def matmul_reduce_scatter(
    x_PTK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> Tensor:
    """Return this rank's rows [T, N] of the sum of all ranks' matmuls; x has rows [P * T, K].

    A slice has the same rows of every rank, so that its sums are a slice of every rank's output.
    """
    by_rank = x_PTK.unflatten(0, (group.size(), -1))
    total = x_PTK.new_empty(by_rank.shape[1], matrix_KN.shape[1])
    pending = []
    for part in slices(by_rank.shape[1], number):
        product = matmul(by_rank[:, part].flatten(0, 1), matrix_KN)
        work = dist.reduce_scatter_tensor(total[part], product, group=group, async_op=True)
        pending.append((work, product))  # the input must stay alive until it is sent
    for work, _ in pending:
        work.wait()
    return total


def matmul_all_reduce(
    x_TK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> Tensor:
    """Return the full sum of all ranks' matmuls, [T, N], on every rank."""
    total = x_TK.new_empty(x_TK.shape[0], matrix_KN.shape[1])
    works = []
    for part in slices(x_TK.shape[0], number):
        matmul(x_TK[part], matrix_KN, out=total[part])
        works.append(dist.all_reduce(total[part], group=group, async_op=True))
    for work in works:
        work.wait()
    return total
