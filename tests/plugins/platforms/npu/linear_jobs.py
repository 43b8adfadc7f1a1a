"""The NPU's matmuls of linears, on a rank, with the torch implementations for comparison."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear import collective_matmul as torch_form
from ascend_run.plugins.platforms.npu import communicators
from ascend_run.plugins.platforms.npu.forms import linear
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls

from .reference import define_reference_operators

ROWS, OUTER = 6, 5


def _drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def product(name: str, inner: int, rows: int, transposed: bool) -> tuple[float, set[str]]:
    """Return (max relative error of the results, operators of torch_npu)."""
    define_reference_operators()
    group: Any = dist.group.WORLD
    x = _drawn(rows, inner, seed=dist.get_rank())
    matrix = _drawn(OUTER, inner, seed=7).t() if transposed else _drawn(inner, OUTER, seed=7)
    named = mock.patch.object(communicators, "communicator_name", return_value="hccl")
    with named, recorded_calls() as recorder:
        got = getattr(linear, name)(x, matrix, group)
    want = getattr(torch_form, name)(x, matrix, group)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    return max(_apart(a, b) for a, b in pairs), {call.operator for call in recorder.calls}


def _apart(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max()) if want.numel() else 0.0
