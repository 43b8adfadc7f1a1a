"""Matmuls in slices of the rows: the collective of one slice overlaps with the next matmul.

Source: MindSpeed's CoC, communication over computation.
"""

# T rows of one rank, P ranks of the group, K inner and N outer width

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from .wide_matmul import Matmul


def slices(rows: int, number: int) -> Iterator[slice]:
    """Yield nearly equal ranges of rows, none of them empty."""
    number = max(1, min(number, rows))
    for index in range(number):
        yield slice(index * rows // number, (index + 1) * rows // number)


class GatheredRows:
    """All ranks' rows, gathered in slices, of which two are in flight at a time.

    The first slice is sent at once, so that it overlaps with what is computed before ``times``. A
    gathered slice is ordered [rank][row of the slice] and is copied to its ranks' rows.
    """

    def __init__(self, x_TK: Tensor, group: dist.ProcessGroup, number: int) -> None:
        self._x_TK, self._group = x_TK.contiguous(), group
        self._left = [*slices(x_TK.shape[0], number)]
        self._pending: list[tuple[slice, Tensor, dist.Work]] = []
        self._send()

    def _send(self) -> None:
        if self._left:
            part = self._left.pop(0)
            rows = self._x_TK[part]
            buffer = rows.new_empty(self._group.size() * rows.shape[0], rows.shape[1])
            work = dist.all_gather_into_tensor(buffer, rows, group=self._group, async_op=True)
            self._pending.append((part, buffer, work))

    def times(self, matrix_KN: Tensor, matmul: Matmul = torch.mm) -> tuple[Tensor, Tensor]:
        """Return all rows times the matrix, [P * T, N], and all rows, [P * T, K], by rank."""
        size, (rows, inner) = self._group.size(), self._x_TK.shape
        product = self._x_TK.new_empty(size, rows, matrix_KN.shape[1])
        gathered = self._x_TK.new_empty(size, rows, inner)
        while self._pending:
            self._send()  # overlaps with the matmul of the one before
            _multiply(*self._pending.pop(0), matrix_KN, product, gathered, matmul)
        return product.flatten(0, 1), gathered.flatten(0, 1)


def all_gather_matmul(
    x_TK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> tuple[Tensor, Tensor]:
    """Return all ranks' rows times the matrix, [P * T, N], and all ranks' rows [P * T, K], by
    rank."""
    return GatheredRows(x_TK, group, number).times(matrix_KN, matmul)


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


@attrs.frozen
class PendingSum:
    """Sums over ranks that are being computed.

    Args:
        sent: What is sent, which must stay alive until it is.
    """

    _total: Tensor
    _works: Sequence[dist.Work]
    _sent: Sequence[Tensor] = ()

    def wait(self) -> Tensor:
        """Return the sums once they are complete."""
        for work in self._works:
            work.wait()
        return self._total


def begin_reduce_scatter(
    x_PTK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> PendingSum:
    """Begin ``matmul_reduce_scatter``: multiply, and wait for no slice."""
    by_rank = x_PTK.unflatten(0, (group.size(), -1))
    total = x_PTK.new_empty(by_rank.shape[1], matrix_KN.shape[1])
    works, products = [], []
    for part in slices(by_rank.shape[1], number):
        products.append(matmul(by_rank[:, part].flatten(0, 1), matrix_KN))
        works.append(
            dist.reduce_scatter_tensor(total[part], products[-1], group=group, async_op=True)
        )
    return PendingSum(total, works, products)


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
    return begin_reduce_scatter(x_PTK, matrix_KN, group, number, matmul).wait()


def begin_all_reduce(
    x_TK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> PendingSum:
    """Begin ``matmul_all_reduce``: multiply, and wait for no slice."""
    total = x_TK.new_empty(x_TK.shape[0], matrix_KN.shape[1])
    works = []
    for part in slices(x_TK.shape[0], number):
        matmul(x_TK[part], matrix_KN, out=total[part])
        works.append(dist.all_reduce(total[part], group=group, async_op=True))
    return PendingSum(total, works)


def matmul_all_reduce(
    x_TK: Tensor,
    matrix_KN: Tensor,
    group: dist.ProcessGroup,
    number: int,
    matmul: Matmul = torch.mm,
) -> Tensor:
    """Return the full sum of all ranks' matmuls, [T, N], on every rank."""
    return begin_all_reduce(x_TK, matrix_KN, group, number, matmul).wait()
