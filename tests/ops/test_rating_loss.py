"""The loss of ratings among a few tokens: its formula, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.rating_loss import rating_loss

VALUES = st.lists(st.floats(-50.0, 50.0), min_size=2, max_size=5)


def losses(values: Sequence[Sequence[float]], ratings: Sequence[int]) -> tuple[list[float], ...]:
    values_PK = torch.tensor(values, dtype=torch.float64)
    loss_P, is_right_P = rating_loss(values_PK, torch.tensor(ratings))
    return loss_P.tolist(), is_right_P.tolist()


@settings(max_examples=50, deadline=None)
@given(values=VALUES, drawn=st.integers(0, 4), shift=st.floats(-30.0, 30.0))
def test_it_is_the_logarithm_of_the_rating_s_share(
    values: list[float], drawn: int, shift: float
) -> None:
    """A number added to all values, such as a vocabulary's normalisation, changes nothing."""
    rating, most = drawn % len(values), max(values)
    shares = [math.exp(value - most) for value in values]
    wanted = math.log(sum(shares)) - (values[rating] - most)
    (loss,), (is_right,) = losses([values], [rating])
    assert loss == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert is_right == (values.index(most) == rating)
    (shifted,), _ = losses([[value + shift for value in values]], [rating])
    assert shifted == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_gradients_are_shares_less_the_rating() -> None:
    values_PK = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    ratings_P = torch.tensor([1, 0])
    found = torch.func.grad(lambda v: rating_loss(v, ratings_P)[0].sum())(values_PK)
    shares_PK = values_PK.exp() / values_PK.exp().sum(1, keepdim=True)
    shares_PK[torch.arange(2), ratings_P] -= 1.0
    torch.testing.assert_close(found, shares_PK, rtol=1e-12, atol=1e-12)


def test_positions_do_not_change_one_another() -> None:
    rows, ratings = [[1.0, 2.0], [4.0, -1.0], [0.0, 0.5]], [0, 0, 1]
    together = losses(rows, ratings)
    alone = [losses([row], [rating]) for row, rating in zip(rows, ratings, strict=True)]
    assert together == ([loss for (loss,), _ in alone], [is_right for _, (is_right,) in alone])
