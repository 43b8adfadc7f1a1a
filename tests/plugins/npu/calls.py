"""One call of every operator, with the shapes that the plugin gives it, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugins.npu import operators
from ascend_run.plugins.npu.operators import Sparsity

S, J, B, N, G, D, T, H, X = 6, 9, 2, 4, 2, 16, 10, 32, 3
SCALE = 0.25


def _triangle(device: torch.device) -> Tensor:
    side = operators.COMPRESSED_MASK_SIZE
    return torch.ones(side, side, dtype=torch.bool, device=device).triu(1)


def _draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _ends(device: torch.device, *ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int64, device=device)


def _sparsity(device: torch.device, kind: str) -> Sparsity:
    mask = None if kind == "full" else _triangle(device)
    return {
        "full": Sparsity(),
        "causal": Sparsity(operators.LEFT_UP_CAUSAL, mask),
        "band": Sparsity(operators.BAND, mask, pre_tokens=4, next_tokens=1),
        "documents": Sparsity(operators.LEFT_UP_CAUSAL, mask, query_ends=(3, 10), key_ends=(3, 10)),
    }[kind]


def attention(device: torch.device, *, kind: str, backward: bool) -> Any:
    packed = kind == "documents"
    heads = {"heads": N, "layout": "TND" if packed else "SBH", "scale": SCALE}
    query_shape = (T, N, D) if packed else (S, B, N * D)
    key_shape = (T, G, D) if packed else (J, B, G * D)
    statistics = (T, N, 8) if packed else (B, N, S, 8)
    q, k, v = (_draw(device, *shape) for shape in (query_shape, key_shape, key_shape))
    sparsity = _sparsity(device, kind)
    if not backward:
        return operators.fusion_attention(q, k, v, **heads, sparsity=sparsity)
    return operators.fusion_attention_grad(
        q,
        k,
        v,
        _draw(device, *query_shape),
        **heads,
        sparsity=sparsity,
        out=_draw(device, *query_shape),
        softmax_max=_draw(device, *statistics),
        softmax_sum=_draw(device, *statistics).abs() + 1,
    )


def rms_norm(device: torch.device, *, backward: bool, dtype: torch.dtype) -> Any:
    x, weight = _draw(device, S, B, H, dtype=dtype), _draw(device, H, dtype=dtype)
    if not backward:
        return operators.rms_norm(x, weight, 1e-5)
    return operators.rms_norm_backward(x, x, weight, _draw(device, S, B, 1))


def swiglu(device: torch.device, *, backward: bool) -> Any:
    gate_up = _draw(device, S, B, 2 * H)
    if not backward:
        return operators.swiglu(gate_up)
    return operators.swiglu_backward(_draw(device, S, B, H), gate_up)


def rotary(device: torch.device, *, interleaved: bool) -> Any:
    cos, sin = _draw(device, S, 1, 1, D), _draw(device, S, 1, 1, D)
    return operators.rotary_mul(_draw(device, S, B, N, D), cos, sin, interleaved)


def grouped(device: torch.device, *, outer: bool, transposed: bool = False) -> Any:
    x, ends = _draw(device, T, H), _ends(device, 4, 4, T)
    if outer:
        return operators.grouped_outer(_draw(device, T, D).t(), x, ends)
    shape = (X, D, H) if transposed else (X, H, D)
    matrices = _draw(device, *shape)
    return operators.grouped_matmul(x, matrices.mT if transposed else matrices, ends)


CALLS: dict[str, Callable[[torch.device], Any]] = {
    **{
        f"attention {kind} {'backward' if backward else 'forward'}": partial(
            attention, kind=kind, backward=backward
        )
        for kind in ("full", "causal", "band", "documents")
        for backward in (False, True)
    },
    "rms_norm float32": partial(rms_norm, backward=False, dtype=torch.float32),
    "rms_norm bfloat16": partial(rms_norm, backward=False, dtype=torch.bfloat16),
    "rms_norm backward": partial(rms_norm, backward=True, dtype=torch.bfloat16),
    "swiglu": partial(swiglu, backward=False),
    "swiglu backward": partial(swiglu, backward=True),
    "rotary half": partial(rotary, interleaved=False),
    "rotary interleaved": partial(rotary, interleaved=True),
    "grouped matmul": partial(grouped, outer=False),
    "grouped matmul transposed": partial(grouped, outer=False, transposed=True),
    "grouped outer": partial(grouped, outer=True),
}
