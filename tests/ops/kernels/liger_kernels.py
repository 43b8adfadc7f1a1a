"""Liger's kernels in Triton's interpreter on the CPU, against the formulas.

Not part of ``make test``, which has no Triton: ``make test-liger`` runs it. The interpreter runs
the kernels in float32; it does not show their speed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime import interpreter

from ascend_run.ops.elementwise.rotary import split_qkv
from ascend_run.ops.kernels import liger
from tests.ops.elementwise.elementwise import draw

EPS = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Relative to the largest value. Statistics are float32; the interpreter has no bfloat16."""


@pytest.fixture(autouse=True)
def kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter: Triton passes a number to a kernel as a float32; the interpreter
    passes a Python float, which lacks the methods that kernels call."""
    convert = interpreter._implicit_cvt

    def as_triton_does(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", as_triton_does)
    # CUDA's rsqrt comes from a device library; Triton's own is equivalent.
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: tl.rsqrt(x))


def outputs_and_gradients(
    operator: Callable[..., Tensor | tuple[Tensor, ...]], leaves: Sequence[Tensor]
) -> list[Tensor]:
    out = operator(*leaves)
    outs = (out,) if isinstance(out, Tensor) else out
    upstream = [draw(*o.shape, seed=9 + i).detach().to(o.dtype) for i, o in enumerate(outs)]
    kept = [gradient.clone() for gradient in upstream]
    gradients = torch.autograd.grad(outs, leaves, upstream)
    for before, after in zip(kept, upstream, strict=True):
        assert torch.equal(before, after), "the upstream gradient is the caller's"
    return [*(o.detach() for o in outs), *gradients]


def assert_same(
    kernel: Callable[..., Tensor | tuple[Tensor, ...]],
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    *leaves: Tensor,
) -> None:
    """Compare with the formula in float64 on equal inputs; the leaves must not change."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    kept = [leaf.detach().clone() for leaf in leaves]
    got = outputs_and_gradients(kernel, leaves)
    for ours, right in zip(got, outputs_and_gradients(formula, wide), strict=True):
        assert ours.dtype is leaves[0].dtype
        apart = (ours.double() - right).abs().max() / right.abs().max()
        assert apart <= TOLERANCE[ours.dtype]
    assert all(map(torch.equal, kept, leaves)), "a kernel wrote over what it was given"


def tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length).double(), 10.0 ** -torch.arange(width // 2))
    whole = torch.cat((angles, angles), -1)
    return whole.cos(), whole.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    pairs = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    first, second = pairs.unbind(axis)
    c, s = (t[:, None, None, : width // 2].to(x) for t in (cos, sin))
    turned = torch.stack((first * c - second * s, second * c + first * s), axis)
    return torch.cat((turned.flatten(-2), x[..., width:]), -1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 8), (3, 1, 24), (7, 33)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    leaves = draw(*shape, seed=1, dtype=dtype), draw(shape[-1], seed=2, dtype=dtype)
    assert_same(lambda x, w: liger.rms_norm(x, w, EPS), formula, *leaves)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    assert_same(liger.swiglu, formula, draw(5, 2, 24, seed=1, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 1, 4, 8), (1, 3, 1, 8)], ids=str)
def test_rotary(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    cos, sin = tables(shape[0], width)
    for interleaved in (False, True):
        if interleaved:
            cos, sin = (t[:, : width // 2].repeat_interleave(2, -1) for t in (cos, sin))
        flat = tables(shape[0], width)
        assert_same(
            lambda x, cos=cos, sin=sin, i=interleaved: liger.rotary(x, cos, sin, i),
            lambda x, flat=flat, i=interleaved: rotate(x, *flat, i),
            draw(*shape, seed=3, dtype=dtype),
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 3, 8), (1, 4, 8), (3, 1, 6)], ids=str)
def test_split_qkv_rotary(sizes: tuple[int, int, int], batch: int, dtype: torch.dtype) -> None:
    groups, queries, width = sizes
    cos, sin = tables(5, width)

    def formula(mixed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split_qkv(mixed, sizes)
        return rotate(q, cos, sin, False), rotate(k, cos, sin, False), v

    mixed = draw(5, batch, groups * (queries + 2) * width, seed=4, dtype=dtype)
    assert_same(lambda x: liger.split_qkv_rotary(x, cos, sin, sizes, False), formula, mixed)
