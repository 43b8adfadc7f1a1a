"""Matrix products whose messages travel beside them, a block of rows at a time round a ring.

While a rank multiplies one rank's rows it sends them on and receives the next: P - 1 messages each
way stand in the place of one collective, with as many bytes, and each but the last is hidden behind
a product of 1 / P of the rows.

Source: Wang et al. 2023, doi:10.1145/3567955.3567959, section 5.
"""

# T rows of one rank, P ranks of the group, K inner and N outer width

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.ring import pass_on


def all_gather_matmul(
    x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(all ranks' rows times the matrix [P * T, N], all ranks' rows [P * T, K]), in their order.

    Numerics: bitwise where a product of some rows gives the bits that it has among others.
    """
    rank, size = group.rank(), group.size()
    rows, gathered = x_TK.shape[0], x_TK.new_empty(size * x_TK.shape[0], x_TK.shape[1])
    product = x_TK.new_empty(size * rows, matrix_KN.shape[1])
    block = x_TK.contiguous()
    for step in range(size):
        here = slice((rank - step) % size * rows, ((rank - step) % size + 1) * rows)
        under_way = pass_on(block, group) if step < size - 1 else None
        gathered[here] = block
        torch.mm(block, matrix_KN, out=product[here])
        if under_way is not None:
            block = under_way.wait()
    return product, gathered


def matmul_reduce_scatter(x_PTK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of their products, [T, N]: this rank's part of the rows [P * T, K].

    A block of sums goes round, and each rank adds its own; it ends where it belongs.
    """
    rank, size = group.rank(), group.size()
    blocks = x_PTK.chunk(size)
    total = blocks[rank - 1] @ matrix_KN
    for step in range(2, size + 1):
        under_way = pass_on(total, group)
        product = blocks[(rank - step) % size] @ matrix_KN
        total = product.add_(under_way.wait())
    return total


def matmul_all_reduce(x_TK: Tensor, matrix_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of their products, [T, N], whole on each of them.

    Rows that the ranks cannot share equally are reduced after the product.
    """
    if x_TK.shape[0] % group.size():
        product = x_TK @ matrix_KN
        dist.all_reduce(product, group=group)
        return product
    part = matmul_reduce_scatter(x_TK, matrix_KN, group)
    whole = part.new_empty(x_TK.shape[0], matrix_KN.shape[1])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole
