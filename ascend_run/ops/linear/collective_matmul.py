"""Matmuls overlapped with their collective, one block of rows at a time around a ring.

While a rank multiplies one block of rows it sends that block on and receives the next: P - 1 sends
and receives replace one collective of as many bytes, and each but the last overlaps with a matmul
of 1 / P of the rows.

Source: Wang et al. 2023, doi:10.1145/3567955.3567959, section 5.
"""

# T rows of one rank, P ranks of the group, K inner and N outer width

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.ring import pass_on

from .wide_matmul import Matmul


class RingMatmuls:
    """The three matmuls with their collectives; this module's functions use ``torch.mm``.

    Args:
        matmul: Multiplies one block.
    """

    def __init__(self, matmul: Matmul) -> None:
        self._matmul = matmul

    def all_gather_matmul(
        self, x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        rank, size = group.rank(), group.size()
        rows, gathered = x_TK.shape[0], x_TK.new_empty(size * x_TK.shape[0], x_TK.shape[1])
        product = x_TK.new_empty(size * rows, matrix_KN.shape[1])
        block = x_TK.contiguous()
        for step in range(size):
            here = slice((rank - step) % size * rows, ((rank - step) % size + 1) * rows)
            in_flight = pass_on(block, group) if step < size - 1 else None
            gathered[here] = block
            self._matmul(block, matrix_KN, out=product[here])
            if in_flight is not None:
                block = in_flight.wait()
        return product, gathered

    def matmul_reduce_scatter(
        self, x_PTK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Each rank adds its own block to the sum that circulates; it ends on the rank that owns
        it."""
        rank, size = group.rank(), group.size()
        blocks = x_PTK.chunk(size)
        total = self._matmul(blocks[rank - 1], matrix_KN)
        for step in range(2, size + 1):
            in_flight = pass_on(total, group)
            product = self._matmul(blocks[(rank - step) % size], matrix_KN)
            total = product.add_(in_flight.wait())
        return total

    def matmul_all_reduce(
        self, x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Reduces after the matmul if the ranks cannot share the rows equally."""
        if x_TK.shape[0] % group.size():
            product = self._matmul(x_TK, matrix_KN)
            dist.all_reduce(product, group=group)
            return product
        part = self.matmul_reduce_scatter(x_TK, matrix_KN, group)
        whole = part.new_empty(x_TK.shape[0], matrix_KN.shape[1])
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole


def all_gather_matmul(
    x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return all ranks' rows times the matrix, [P * T, N], and all ranks' rows [P * T, K], by rank.

    Numerics: bitwise, if a matmul of some rows equals the same rows of a larger matmul.
    """
    return RingMatmuls(torch.mm).all_gather_matmul(x_TK, matrix_KN, group)


def matmul_reduce_scatter(x_PTK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows [T, N] of the sum of all ranks' matmuls; x has rows [P * T, K]."""
    return RingMatmuls(torch.mm).matmul_reduce_scatter(x_PTK, matrix_KN, group)


def matmul_all_reduce(x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the full sum of all ranks' matmuls, [T, N], on every rank."""
    return RingMatmuls(torch.mm).matmul_all_reduce(x_TK, matrix_KN, group)
