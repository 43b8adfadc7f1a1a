"""Matrix products in slices of the rows: the collective of one travels while the next is computed.

Source: the idea of MindSpeed's CoC, communication over computation.
"""

# T rows of one rank, P ranks of the group, K inner and N outer width

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist


def slices(rows: int, number: int) -> Iterator[slice]:
    """Nearly equal ranges of rows, none of them empty."""
    number = max(1, min(number, rows))
    for index in range(number):
        yield slice(index * rows // number, (index + 1) * rows // number)


def all_gather_matmul(
    x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup, number: int
) -> tuple[Tensor, Tensor]:
    """(all ranks' rows times the matrix [P * T, N], all ranks' rows [P * T, K]), in their order.

    What is gathered of a slice lies [rank][row of the slice]; it is put to its rank's rows.
    """
    size, (rows, inner) = group.size(), x_TK.shape
    x_TK = x_TK.contiguous()
    product = x_TK.new_empty(size, rows, matrix_KN.shape[1])
    gathered = x_TK.new_empty(size, rows, inner)
    waiting = []
    for part in slices(rows, number):
        buffer = x_TK.new_empty(size * (part.stop - part.start), inner)
        work = dist.all_gather_into_tensor(buffer, x_TK[part], group=group, async_op=True)
        waiting.append((part, buffer, work))
        if len(waiting) > 1:  # one is under way while the one before is multiplied
            _multiply(*waiting.pop(0), matrix_KN, product, gathered)
    _multiply(*waiting.pop(), matrix_KN, product, gathered)
    return product.flatten(0, 1), gathered.flatten(0, 1)


def _multiply(
    part: slice,
    buffer: Tensor,
    work: dist.Work,
    matrix_KN: Tensor,
    product_PTN: Tensor,
    gathered_PTK: Tensor,
) -> None:
    work.wait()
    size = product_PTN.shape[0]
    gathered_PTK[:, part] = buffer.view(size, -1, buffer.shape[1])
    product_PTN[:, part] = (buffer @ matrix_KN).view(size, -1, matrix_KN.shape[1])


def matmul_reduce_scatter(
    x_PTK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup, number: int
) -> Tensor:
    """The sum over the ranks of their products, [T, N]: this rank's part of the rows [P * T, K].

    A slice is the same rows of every rank, so that its sums are a slice of every rank's part.
    """
    by_rank = x_PTK.unflatten(0, (group.size(), -1))
    total = x_PTK.new_empty(by_rank.shape[1], matrix_KN.shape[1])
    waiting = []
    for part in slices(by_rank.shape[1], number):
        product = by_rank[:, part].flatten(0, 1) @ matrix_KN
        work = dist.reduce_scatter_tensor(total[part], product, group=group, async_op=True)
        waiting.append((work, product))  # the product must stay until it has left
    for work, _ in waiting:
        work.wait()
    return total


def matmul_all_reduce(
    x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup, number: int
) -> Tensor:
    """The sum over the ranks of their products, [T, N], whole on each of them."""
    total = x_TK.new_empty(x_TK.shape[0], matrix_KN.shape[1])
    works = []
    for part in slices(x_TK.shape[0], number):
        torch.mm(x_TK[part], matrix_KN, out=total[part])
        works.append(dist.all_reduce(total[part], group=group, async_op=True))
    for work in works:
        work.wait()
    return total
