"""Grouped GEMM by oneDNN in float32, whose groups are padded to few different numbers of rows.

oneDNN generates a kernel for each shape, which takes longer than the matmul of a small group, and
the rows of an expert differ in every step.
"""

# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.linear.onednn_matmul import onednn_matmul

from .grouped_matmul import Counts, LoopGroups

FEWEST_ROWS: Final = 16
"""``torch.mm`` multiplies groups of fewer rows."""
FEWEST_SUMMED: Final = 64
"""And sums over fewer rows, whose result oneDNN does not write where it belongs."""
STEP: Final = 32
"""Groups are padded to multiples of this; those of many rows to multiples of up to an eighth of
them."""


def rounded(rows: int) -> int:
    """Return the number of rows to which a group is padded."""
    step = max(STEP, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


class RoundedGroups(LoopGroups):
    """LoopGroups by oneDNN for float32; other dtypes as there."""

    def __init__(self, counts: Counts, device: torch.device) -> None:
        super().__init__(counts, device)
        self.padded = [rounded(count) for count in self.counts]

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        """Multiply each group with rows of its neighbours, whose results are dropped."""
        if x_TK.dtype is not torch.float32:
            return super().matmul(x_TK, matrices_XKN)
        total, start = x_TK.shape[0], 0
        y_TN = x_TK.new_empty(total, matrices_XKN.shape[2])
        for count, padded, matrix in zip(
            self.counts, self.padded, matrices_XKN.unbind(0), strict=True
        ):
            y, first = y_TN[start : start + count], max(0, min(start, total - padded))
            if count < FEWEST_ROWS:
                torch.mm(x_TK[start : start + count], matrix, out=y)
            else:
                product = onednn_matmul(x_TK[first : first + padded], matrix)
                y.copy_(product[start - first : start - first + count])
            start += count
        return y_TN

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        if a_TN.dtype is not torch.float32:
            return super().outer(a_TN, b_TK)
        products = a_TN.new_empty(len(self.counts), a_TN.shape[1], b_TK.shape[1])
        for product, a, b, padded in self._parts(products, a_TN, b_TK):
            _outer(a, b, padded, out=product)
        return products

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        if a_TN.dtype is not torch.float32:
            super().add_outer(sum_XNK, a_TN, b_TK)
            return
        for total, a, b, padded in self._parts(sum_XNK, a_TN, b_TK):
            total.add_(_outer(a, b, padded))

    def _parts(
        self, out: Tensor, a: Tensor, b: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """Yield the matrix, the rows, and their padded number, of each group."""
        parts = (out.unbind(0), a.split(self.counts), b.split(self.counts), self.padded)
        return zip(*parts, strict=True)


def _outer(a_tN: Tensor, b_tK: Tensor, padded: int, out: Tensor | None = None) -> Tensor:
    """Compute ``a.T @ b``, with rows of zeros added to both."""
    if a_tN.shape[0] < FEWEST_SUMMED:
        return torch.mm(a_tN.t(), b_tK, out=out)
    more = (0, 0, 0, padded - a_tN.shape[0])
    return onednn_matmul(F.pad(a_tN, more).t(), F.pad(b_tK, more), out=out)
