"""Matmuls of tensor-parallel linears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from ascend_run.plugins.platforms.npu.operators import linear as operators

from .draws import D, S, draw

RANKS, INNER = 2, 256
NAME = "hccl"


@contextmanager
def one_of_two(device: torch.device) -> Iterator[None]:
    """Set up a group of two with only this rank: collectives do nothing, and results have their
    shapes."""
    if device.type == "meta" or dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def linear(device: torch.device, *, name: str, transposed: bool) -> Any:
    x = draw(device, RANKS * S, INNER, dtype=torch.bfloat16)
    shape = (D, INNER) if transposed else (INNER, D)
    matrix = draw(device, *shape, dtype=torch.bfloat16)
    with one_of_two(device):
        operator = getattr(operators, name)
        return operator(x, matrix.t() if transposed else matrix, NAME, RANKS)


CALLS = {
    f"{name.replace('_', ' ')}{' transposed' if transposed else ''}": partial(
        linear, name=name, transposed=transposed
    )
    for name in ("all_gather_matmul", "matmul_reduce_scatter")
    for transposed in (False, True)
}
