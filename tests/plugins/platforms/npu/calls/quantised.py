"""Quantised matmuls and MLPs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from ascend_run.plugins.platforms.npu.operators import quantised as operators

from .draws import D, H, T, X, draw, integers

F = 24


def _groups(device: torch.device, per_group: bool) -> Any:
    return torch.tensor((4, 0, T - 4) if per_group else (4, 4, T), device=device)


def grouped(
    device: torch.device, *, dtype: torch.dtype, per_group: bool, per_token: bool, bias: bool
) -> Any:
    scale = draw(device, X, D)
    is_int8 = dtype is torch.int8
    if dtype is torch.bfloat16:
        scale = scale.bfloat16()
    return operators.quant_grouped_matmul(
        integers(device, T, H),
        integers(device, X, H, D),
        operators.trans_quant_param(scale) if is_int8 else scale,
        _groups(device, per_group),
        per_group=per_group,
        per_token_scale_T=draw(device, T) if per_token else None,
        bias_XN=integers(device, X, D).int() if bias else None,
        activation="silu" if per_token else None,
        output_dtype=None if is_int8 else dtype,
    )


def weights_only(device: torch.device, *, bias: bool) -> Any:
    scale = draw(device, X, D, dtype=torch.float16)
    return operators.weight_quant_grouped_matmul(
        draw(device, T, H, dtype=torch.float16),
        integers(device, X, H, D),
        scale,
        scale,
        _groups(device, False),
        per_group=False,
        bias_XN=scale if bias else None,
    )


def ffn(device: torch.device, *, kind: str, experts: bool, first: bool, second: bool) -> Any:
    """Call one MLP for each kind of operands, with or without experts and biases."""
    lead = (X,) if experts else ()
    tokens = (4, 0, T - 4) if experts else None
    biases = {
        "bias1": draw(device, *lead, F, dtype=torch.float16) if first else None,
        "bias2": draw(device, *lead, H, dtype=torch.float16) if second else None,
    }
    if kind == "wide":
        shapes = ((T, H), (*lead, H, F), (*lead, F, H))
        operands = [draw(device, *shape, dtype=torch.float16) for shape in shapes]
        activation = "fastgelu" if experts else "gelu"
        return operators.ffn(*operands, activation, tokens, **biases)
    weights = integers(device, *lead, H, F), integers(device, *lead, F, H)
    if kind == "int8":
        dtype = torch.bfloat16 if first else torch.float16
        encode = operators.trans_quant_param if dtype is torch.float16 else torch.Tensor.bfloat16
        whole = {name: None if b is None else b.int() for name, b in biases.items()}
        return operators.ffn(
            integers(device, T, H),
            *weights,
            "relu",
            tokens,
            **whole,
            scale=draw(device, *(lead or (1,))),
            offset=draw(device, *(lead or (1,))),
            deq_scale1=encode(draw(device, *lead, F)),
            deq_scale2=encode(draw(device, *lead, H)),
            output_dtype=dtype,
        )
    inner, outer = (draw(device, *lead, n, dtype=torch.float16) for n in (F, H))
    return operators.ffn(
        draw(device, T, H, dtype=torch.float16),
        *weights,
        "silu",
        tokens,
        **biases,
        antiquant_scale1=inner,
        antiquant_scale2=outer,
        antiquant_offset1=inner,
        antiquant_offset2=outer,
    )


HALVES = (torch.float16, torch.bfloat16)
CALLS = {
    **{
        f"quantised grouped {dtype}{' tokens' * tokens}{' bias' * bias}".replace("torch.", ""): (
            partial(grouped, dtype=dtype, per_group=bias, per_token=tokens, bias=bias)
        )
        for dtype, tokens, bias in product(HALVES, (False, True), (False, True))
    },
    **{
        f"quantised grouped int8{' bias' * bias}": partial(
            grouped, dtype=torch.int8, per_group=False, per_token=False, bias=bias
        )
        for bias in (False, True)
    },
    "weight-quantised grouped": partial(weights_only, bias=False),
    "weight-quantised grouped bias": partial(weights_only, bias=True),
    **{
        f"ffn {kind}{' experts' * experts}{' bias1' * first}{' bias2' * second}": partial(
            ffn, kind=kind, experts=experts, first=first, second=second
        )
        for kind in ("wide", "int8", "int8 weights")
        for experts, first, second in product((False, True), repeat=3)
    },
}
