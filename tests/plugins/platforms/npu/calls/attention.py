"""Fused attention: both versions, every layout, mask, bias and dropout that the plugin uses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.operators import Bias, Call, Drawn, Sparsity

from .draws import B, D, G, J, N, S, T, draw

SCALE = 0.25

SHAPES = {
    "SBH": ((S, B, N * D), (J, B, G * D)),
    "BSH": ((B, S, N * D), (B, J, G * D)),
    "BSND": ((B, S, N, D), (B, J, G, D)),
    "BNSD": ((B, N, S, D), (B, G, J, D)),
    "TND": ((T, N, D), (T, G, D)),
}
SQUARE = {"SBH": ((S, B, N * D), (S, B, G * D))}
"""With as many keys as queries, for slopes."""


def _triangle(device: torch.device) -> Tensor:
    side = operators.COMPRESSED_MASK_SIZE
    return torch.ones(side, side, dtype=torch.bool, device=device).triu(1)


def _call(device: torch.device, kind: str, layout: str, version: int) -> Call:
    mask = _triangle(device)
    plain = Call(heads=N, layout=layout, scale=SCALE, version=version)
    ends = {"query_ends": (3, 10), "key_ends": (3, 10)}
    documents = Sparsity(operators.LEFT_UP_CAUSAL, mask, **ends)
    if layout == "TND":
        keep = 0.5 if kind == "dropout" else 1.0
        return plain._replace(sparsity=documents, keep_probability=keep)
    after = operators.BEFORE_SCALE if version == 1 else operators.AFTER_SCALE
    causal = Sparsity(operators.LEFT_UP_CAUSAL, mask)
    whole = torch.ones(S, J, dtype=torch.bool, device=device).triu(1)
    slopes = torch.ones(N, device=device)
    return {
        "full": plain,
        "causal": plain._replace(sparsity=causal),
        "whole mask": plain._replace(sparsity=Sparsity(operators.WHOLE_MASK, whole)),
        "band": plain._replace(
            sparsity=Sparsity(operators.BAND, mask, pre_tokens=4, next_tokens=1)
        ),
        "bias": plain._replace(bias=Bias(draw(device, 1, N, S, J), after)),
        "bias of keys": plain._replace(bias=Bias(draw(device, B, N, 1, J), after)),
        "bias before scale": plain._replace(
            bias=Bias(draw(device, B, N, S, J), operators.BEFORE_SCALE)
        ),
        "causal bias": plain._replace(sparsity=causal, bias=Bias(draw(device, 1, N, S, J), after)),
        "slopes without a mask": plain._replace(bias=Bias(slopes, operators.SLOPES)),
        "slopes": plain._replace(
            sparsity=causal, bias=Bias(slopes, operators.SLOPES, query_start=8, key_start=2)
        ),
        "root slopes": plain._replace(
            sparsity=causal, bias=Bias(slopes, operators.ROOT_SLOPES, query_start=2, key_start=8)
        ),
        "dropout": plain._replace(sparsity=causal, keep_probability=0.5),
    }[kind]


def attention(device: torch.device, *, kind: str, layout: str, version: int, backward: bool) -> Any:
    shapes = SQUARE if "slopes" in kind else SHAPES
    query_shape, key_shape = shapes[layout]
    q, k, v = (draw(device, *shape) for shape in (query_shape, key_shape, key_shape))
    call = _call(device, kind, layout, version)
    if not backward:
        return operators.fusion_attention(q, k, v, call)[:3]
    statistics = (T, N, 8) if layout == "TND" else (B, N, S, 8)
    pairs = 3 * 3 + 7 * 7 if layout == "TND" else B * S * J
    return operators.fusion_attention_grad(
        q,
        k,
        v,
        draw(device, *query_shape),
        call,
        out=draw(device, *query_shape),
        softmax_max=draw(device, *statistics),
        softmax_sum=draw(device, *statistics).abs() + 1,
        drawn=Drawn(3, 4, N * pairs) if kind == "dropout" else Drawn(),
    )


KINDS = {
    1: (
        *(("full", layout) for layout in SHAPES),
        *((kind, "SBH") for kind in ("causal", "whole mask", "band", "bias", "bias of keys")),
        ("causal bias", "SBH"),
        *(("dropout", layout) for layout in ("SBH", "TND")),
    ),
    2: (
        *(("full", layout) for layout in SHAPES),
        ("causal bias", "SBH"),
        ("slopes without a mask", "SBH"),
        *((kind, "SBH") for kind in ("band", "bias", "bias before scale", "dropout")),
        *((kind, "SBH") for kind in ("slopes", "root slopes")),
    ),
}

CALLS = {
    f"attention v{version} {layout} {kind} {'backward' if backward else 'forward'}": partial(
        attention, kind=kind, layout=layout, version=version, backward=backward
    )
    for version, kinds in KINDS.items()
    for kind, layout in kinds
    for backward in (False, True)
}
