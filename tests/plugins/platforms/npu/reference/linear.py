"""Matmuls of tensor-parallel linears, as documented. The group ``hccl`` has all ranks here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def _check(x: Tensor, x2: Tensor, world_size: int, options: dict[str, Any]) -> None:
    assert not any(options.values()), f"not written down here: {options}"
    assert x.dim() == x2.dim() == 2
    assert x.is_contiguous(), "the left matrix is not taken transposed"
    assert x2.is_contiguous() or x2.t().is_contiguous()
    assert x.dtype == x2.dtype
    assert x.shape[1] == x2.shape[0]
    assert 256 <= x.shape[1] < 65535
    assert world_size in (2, 4, 8, 16)


def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _check(input, x2, world_size, options)
    assert gather_index == comm_turn == 0
    assert hcom == "hccl"
    assert dist.get_world_size() == world_size
    parts = [torch.empty_like(input) for _ in range(world_size)]
    dist.all_gather(parts, input)
    gathered = torch.cat(parts)
    return gathered @ x2, gathered if gather_output else input.new_empty(0)


def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    comm_turn: int = 0,
    **options: Any,
) -> Tensor:
    _check(input, x2, world_size, options)
    assert (reduce_op, comm_turn) == ("sum", 0)
    assert input.shape[0] % world_size == 0
    assert hcom == "hccl"
    assert dist.get_world_size() == world_size
    product = input @ x2
    dist.all_reduce(product)
    return product.chunk(world_size)[dist.get_rank()].clone()
