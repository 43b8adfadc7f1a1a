"""Quantised MLPs and scales, as documented."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = {
    "relu": lambda z: z.clamp(min=0),
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
    "fastgelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
}


def npu_trans_quant_param(
    scale: Tensor, offset: Tensor | None = None, round_mode: int = 0
) -> Tensor:
    """Return the top 19 bits of the float (sign, exponent, 10 of the mantissa) in the low half."""
    assert scale.dtype is torch.float32
    assert scale.dim() == 1 or (scale.dim() == 2 and scale.shape[0] == 1)
    assert offset is None
    assert round_mode == 0
    return (scale.view(torch.int32) & ~0x1FFF).to(torch.int64) & 0xFFFFFFFF


def decoded(scale: Tensor) -> Tensor:
    """Return the value of an encoded or a plain scale."""
    if scale.dtype is not torch.int64:
        return scale.double()
    low = torch.where(scale >= 2**31, scale - 2**32, scale).to(torch.int32)
    return low.view(torch.float32).double()


def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: list[int] | None = None,
    expert_tokens_index: list[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    assert activation in ACTIVATIONS, "the gated ones have limits of their own"
    assert expert_tokens_index is None
    full = x.dtype is torch.int8
    weights_only = weight1.dtype is torch.int8 and not full
    for value in (scale, offset, deq_scale1, deq_scale2):
        assert (value is not None) == full, "all of them with int8 operands, and only there"
    for value in (antiquant_scale1, antiquant_scale2, antiquant_offset1, antiquant_offset2):
        assert (value is not None) == weights_only, "all of them with int8 weights beside wide rows"
    by_expert = expert_tokens is not None
    assert weight1.dim() == (3 if by_expert else 2)
    counts = expert_tokens if expert_tokens is not None else [x.shape[0]]
    assert not by_expert or sum(counts) == x.shape[0]
    if full:
        kind = torch.int64 if output_dtype in (None, torch.float16) else torch.bfloat16
        assert deq_scale1.dtype is deq_scale2.dtype is kind  # type: ignore[union-attr]
        for bias in (bias1, bias2):
            assert bias is None or bias.dtype is torch.int32

    def one(rows: Tensor, pick: Any) -> Tensor:
        weights = [pick(weight1).double(), pick(weight2).double()]
        biases = [0.0 if b is None else pick(b).double() for b in (bias1, bias2)]
        if weights_only:
            for i, (s, o) in enumerate(
                ((antiquant_scale1, antiquant_offset1), (antiquant_scale2, antiquant_offset2))
            ):
                weights[i] = (weights[i] + pick(o).double()) * pick(s).double()
        hidden = rows.double() @ weights[0] + biases[0]
        if not full:
            return ACTIVATIONS[activation](hidden) @ weights[1] + biases[1]
        active = ACTIVATIONS[activation](hidden * decoded(pick(deq_scale1)))
        level = torch.round(active * pick(scale).double() + pick(offset).double())
        level = torch.clamp(level, -128, 127)
        return (level @ weights[1] + biases[1]) * decoded(pick(deq_scale2))

    if not by_expert:
        y = one(x, lambda t: t)
    else:
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        y = torch.cat(
            [one(x[a:b], lambda t, i=i: t[i]) for i, (a, b) in enumerate(pairwise(starts))]
        )
    return y.to((output_dtype or torch.float16) if full else x.dtype)
