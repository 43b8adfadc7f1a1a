"""Fused MLPs against the formula, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.feed_forward import ffn, quantised_ffn, weight_quantised_ffn
from tests.ops.elementwise import elementwise as check

H, F, M = 6, 10, 7
SIZES = (2, 0, 5)
OWNER = [group for group, size in enumerate(SIZES) for _ in range(size)]
SCALAR = {
    "relu": lambda z: max(z, 0.0),
    "gelu": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
    "fastgelu": lambda z: z / (1 + math.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + math.exp(-z)),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


def by_hand(hidden: Tensor, activation: str) -> Tensor:
    if activation in GATES:
        half = hidden.shape[-1] // 2
        return by_hand(hidden[..., :half], GATES[activation]) * hidden[..., half:]
    values = [SCALAR[activation](z) for z in hidden.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(hidden.shape)


def drawn(*shape: int, seed: int) -> Tensor:
    return check.draw(*shape, seed=seed).detach()


@pytest.mark.parametrize("activation", [*SCALAR, *GATES])
def test_dense_follows_the_formula(activation: str) -> None:
    width = 2 * F if activation in GATES else F
    x, w1, w2 = drawn(2, M, H, seed=0), drawn(H, width, seed=1), drawn(F, H, seed=2)
    b1, b2 = drawn(width, seed=3), drawn(H, seed=4)
    got = ffn(x, w1, w2, activation, bias1=b1, bias2=b2)
    want = torch.einsum("bmf,fh->bmh", by_hand(torch.matmul(x, w1) + b1, activation), w2) + b2
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("experts", "cumulative"), [([2, 0, 5], False), ([2, 2, 7], True)])
def test_experts_take_their_own_weights(experts: list[int], cumulative: bool) -> None:
    x, w1, w2 = drawn(M, H, seed=0), drawn(3, H, F, seed=1), drawn(3, F, H, seed=2)
    b1, b2 = drawn(3, F, seed=3), drawn(3, H, seed=4)
    got = ffn(x, w1, w2, "silu", bias1=b1, bias2=b2, experts=experts, cumulative=cumulative)
    hidden = torch.einsum("mh,mhf->mf", x, w1[OWNER]) + b1[OWNER]
    want = torch.einsum("mf,mfh->mh", by_hand(hidden, "silu"), w2[OWNER]) + b2[OWNER]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def integers(*shape: int, seed: int, span: int = 127) -> Tensor:
    return torch.randint(-span, span + 1, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("by_expert", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
def test_quantised_goes_through_int8(by_expert: bool, per_channel: bool) -> None:
    lead = (3,) if by_expert else ()
    x, w1, w2 = integers(M, H, seed=0), integers(*lead, H, F, seed=1), integers(*lead, F, H, seed=2)
    b1, b2 = integers(*lead, F, seed=3), integers(*lead, H, seed=4)
    deq1 = drawn(*lead, F, seed=5).abs() / 1e4
    deq2 = drawn(*lead, H, seed=6).abs() / 1e4
    levels = drawn(*(lead or (1,)), *((F,) if per_channel else ()), seed=7)
    scale = 20 * levels[0] if per_channel and not by_expert else 20 * levels
    offset = drawn(*(lead or (1,)), seed=8)

    def of(row: int, value: Tensor) -> Tensor:
        return value[OWNER[row]] if by_expert else value

    rows = []
    for row in range(M):
        hidden = (x[row] @ of(row, w1) + of(row, b1)) * of(row, deq1)
        active = by_hand(hidden.double(), "silu") * of(row, scale) + of(row, offset)
        level = torch.tensor([max(-128, min(127, round(z))) for z in active.tolist()])
        rows.append((level @ of(row, w2) + of(row, b2)) * of(row, deq2))
    want = torch.stack(rows)
    got = quantised_ffn(
        *(t.to(torch.int8) for t in (x, w1, w2)),
        "silu",
        scale=scale,
        offset=offset,
        deq_scale1=deq1,
        deq_scale2=deq2,
        bias1=b1.int(),
        bias2=b2.int(),
        experts=list(SIZES) if by_expert else None,
        output_dtype=torch.float64,
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_offsets", [True, False])
def test_int8_weights_stand_for_their_scaled_values(with_offsets: bool) -> None:
    x, w1, w2 = drawn(M, H, seed=0), integers(3, H, F, seed=1), integers(3, F, H, seed=2)
    s1, s2 = drawn(3, F, seed=3) / 100, drawn(3, H, seed=4) / 100
    o1, o2 = (drawn(3, F, seed=5), drawn(3, H, seed=6)) if with_offsets else (None, None)
    b1, b2 = drawn(3, F, seed=7), drawn(3, H, seed=8)
    zero = torch.zeros((), dtype=torch.float64)
    rows = []
    for row, group in enumerate(OWNER):
        first = (w1[group] + (zero if o1 is None else o1[group])) * s1[group]
        second = (w2[group] + (zero if o2 is None else o2[group])) * s2[group]
        rows.append(by_hand(x[row] @ first + b1[group], "gelu") @ second + b2[group])
    got = weight_quantised_ffn(
        x,
        w1.to(torch.int8),
        w2.to(torch.int8),
        "gelu",
        antiquant_scale1=s1,
        antiquant_scale2=s2,
        antiquant_offset1=o1,
        antiquant_offset2=o2,
        bias1=b1,
        bias2=b2,
        experts=list(SIZES),
    )
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_gradients_and_unknown_activations_are_refused() -> None:
    x, w1, w2 = drawn(M, H, seed=0), drawn(H, F, seed=1), drawn(F, H, seed=2)
    with pytest.raises(RuntimeError, match=r"ffn has no backward; call it under torch\.no_grad"):
        ffn(x, w1.requires_grad_(), w2, "relu")
    with torch.no_grad():
        ffn(x, w1, w2, "relu")
    refused: Any = w1.detach()
    with pytest.raises(ValueError, match="activation 'tanh'; expected one of relu, gelu"):
        ffn(x, refused, w2, "tanh")
