"""The NPU's communicating operators, on a rank, with the torch implementations for comparison."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear import reduced_matmul as torch_form
from ascend_run.ops.linear.reduced_matmul import Dequantisation
from ascend_run.plugins.platforms.npu import communicators
from ascend_run.plugins.platforms.npu.forms import reduced
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
from tests.support.npu_calls import check

from .reference import define_reference_operators

EXACT = 1 / 1024
"""Relative spacing of scales: the encoding has 10 mantissa bits, and a power of two."""


def _drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _operands(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Dequantisation]:
    rank = dist.get_rank()
    if kind == "wide":
        x, matrix = (_drawn(*s, seed=rank, dtype=dtype) for s in ((3, 2, 64), (64, 6)))
        return x, matrix, _drawn(6, seed=2, dtype=dtype), Dequantisation()
    matrix = _integers(64, 6, seed=rank)
    if kind == "int8":
        scale = torch.arange(1, 7) * EXACT / 64
        bias = _integers(6, seed=2).int()
        return _integers(3, 2, 64, seed=rank), matrix, bias, Dequantisation(dequant_scale=scale)
    shape = (2, 6) if kind == "group" else (6,)
    scale, offset = (_drawn(*shape, seed=seed, dtype=dtype) / 64 for seed in (3, 4))
    how = Dequantisation(
        antiquant_scale=scale, antiquant_offset=offset, group_size=32 if kind == "group" else 0
    )
    return _drawn(3, 2, 64, seed=rank, dtype=dtype), matrix, _drawn(6, seed=2, dtype=dtype), how


def add_rms_norm(kind: str, dtype: torch.dtype, in_place: bool) -> tuple[float, set[str]]:
    """Return (max relative error of y and norm, operators of torch_npu)."""
    define_reference_operators()
    before = communicators.communicator_name
    communicators.communicator_name = lambda group: "hccl"
    x, matrix, bias, how = _operands(kind, dtype)
    residual, gamma = _drawn(3, 2, 6, seed=5, dtype=dtype), _drawn(6, seed=6, dtype=dtype)
    name = f"mm_all_reduce_add_rms_norm{'_' * in_place}"
    given = residual.clone()
    try:
        with recorded_calls(check) as recorder:
            got = getattr(reduced, name)(
                x, matrix, given, gamma, dist.group.WORLD, bias_N=bias, quantised=how
            )
    finally:
        communicators.communicator_name = before
    assert (got[0] is given) == in_place
    want = getattr(torch_form, name)(
        x, matrix, residual, gamma, dist.group.WORLD, bias_N=bias, quantised=how
    )
    return max(map(difference, got, want)), {call.operator for call in recorder.calls}


def grouped(split_item: int, sizes: tuple[int, int, int] = (3, 0, 2)) -> tuple[float, set[str]]:
    define_reference_operators()
    rank, single = dist.get_rank(), split_item in (1, 3)
    rows = [_drawn(size, 8, seed=rank, dtype=torch.float32) for size in sizes]
    matrices = [_drawn(8, 6, seed=10 + rank + i, dtype=torch.float32) for i in range(3)]
    biases = [_drawn(6, seed=20 + i, dtype=torch.float32) for i in range(3)]
    arguments = ([torch.cat(rows)] if single else rows, matrices, dist.group.WORLD)
    options = {
        "biases": biases,
        "group_list": [3, 3, 5] if single else None,
        "split_item": split_item,
    }
    with recorded_calls(check) as recorder:
        got = reduced.grouped_matmul_all_reduce(*arguments, **options)
    want = torch_form.grouped_matmul_all_reduce(*arguments, **options)
    assert len(got) == len(want)
    apart = [difference(a, b) for a, b in zip(got, want, strict=True) if b.numel()]
    return max(apart, default=0.0), {call.operator for call in recorder.calls}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the max error relative to the largest value."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return float((ours - theirs).abs().max().double() / theirs.abs().max().double())
