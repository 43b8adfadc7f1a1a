"""Merged attention against the softmax over all keys, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ascend_run.ops.attention.log_sum_exp import merge_into

TOLERANCE = 1e-12
B, N, S, E = 2, 3, 5, 4
PARTS = (slice(0, 2), slice(2, 9), slice(9, 12))
ORDERS = list(itertools.permutations(range(3)))


def problem(*batch: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scores [B, N, S, 12] and values [B, N, 12, E]."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn((*batch, N, S, 12), generator=generator, dtype=torch.float64) * factor
    values = torch.randn((*batch, N, 12, E), generator=generator, dtype=torch.float64)
    return scores, values


def attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [S, ..., N, E] and log-sum-exp; zeros and -inf for a query without keys."""
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ values / torch.where(total == 0, 1.0, total)
    return out.movedim(-2, 0), (total.log() + peak).squeeze(-1)


def merged(out: Tensor, lse: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = out.clone(), lse.clone()
    merge_into(out, lse, *more)
    return out, lse


def in_parts(scores: Tensor, values: Tensor, order: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    found = [attention(scores[..., p], values[..., p, :]) for p in (PARTS[i] for i in order)]
    out, lse = found[0]
    for more in found[1:]:
        out, lse = merged(out, lse, *more)
    return out, lse


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("batch", [(B,), ()], ids=["batched", "packed"])
def test_parts_in_any_order_are_the_whole(batch: tuple[int, ...], order: tuple[int, ...]) -> None:
    scores, values = problem(*batch)
    for got, expected in zip(
        in_parts(scores, values, order), attention(scores, values), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("factor", [1e-8, 1e3, 1e6])
def test_scores_of_any_size_neither_overflow_nor_vanish(factor: float) -> None:
    scores, values = problem(B, factor=factor)
    for got, expected in zip(
        in_parts(scores, values, (0, 1, 2)), attention(scores, values), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_query_that_sees_no_key_of_some_parts_or_of_all(order: tuple[int, ...]) -> None:
    scores, values = problem(B)
    scores[:, :, 0, PARTS[0]] = -torch.inf
    scores[:, :, 1, PARTS[1]] = -torch.inf
    scores[:, :, 2, : PARTS[1].stop] = -torch.inf
    scores[:, :, 3] = -torch.inf
    out, lse = in_parts(scores, values, order)
    expected_out, expected_lse = attention(scores, values)
    torch.testing.assert_close(out, expected_out, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(out[3], torch.zeros(B, N, E, dtype=torch.float64))
    assert (lse[..., 3] == -torch.inf).all()


def test_some_queries_of_a_sum_are_merged_in_place_and_the_others_left() -> None:
    scores, values = problem(B)
    out, lse = attention(scores[..., PARTS[0]], values[..., PARTS[0], :])
    more = attention(scores[..., 2:, PARTS[1]], values[..., PARTS[1], :])
    expected = merged(out[2:], lse[..., 2:], *more)
    before = out[:2].clone(), lse[..., :2].clone()
    merge_into(out[2:], lse[..., 2:], *more)
    assert torch.equal(out[2:], expected[0])
    assert torch.equal(lse[..., 2:], expected[1])
    assert torch.equal(out[:2], before[0])
    assert torch.equal(lse[..., :2], before[1])


def test_a_part_in_half_precision_is_added_to_a_float32_sum() -> None:
    scores, values = problem(B)
    out, lse = attention(scores[..., PARTS[0]].float(), values[..., PARTS[0], :].float())
    more_out, more_lse = attention(scores[..., PARTS[1]].float(), values[..., PARTS[1], :].float())
    got = merged(out, lse, more_out.bfloat16(), more_lse)
    expected = merged(out, lse, more_out.bfloat16().float(), more_lse)
    assert got[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
