"""Fused attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugins.npu import operators
from ascend_run.plugins.npu.operators import Sparsity

from .draws import B, D, G, J, N, S, T, draw

SCALE = 0.25


def _triangle(device: torch.device) -> Tensor:
    side = operators.COMPRESSED_MASK_SIZE
    return torch.ones(side, side, dtype=torch.bool, device=device).triu(1)


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
    q, k, v = (draw(device, *shape) for shape in (query_shape, key_shape, key_shape))
    sparsity = _sparsity(device, kind)
    if not backward:
        return operators.fusion_attention(q, k, v, **heads, sparsity=sparsity)
    return operators.fusion_attention_grad(
        q,
        k,
        v,
        draw(device, *query_shape),
        **heads,
        sparsity=sparsity,
        out=draw(device, *query_shape),
        softmax_max=draw(device, *statistics),
        softmax_sum=draw(device, *statistics).abs() + 1,
    )


CALLS = {
    f"attention {kind} {'backward' if backward else 'forward'}": partial(
        attention, kind=kind, backward=backward
    )
    for kind in ("full", "causal", "band", "documents")
    for backward in (False, True)
}
