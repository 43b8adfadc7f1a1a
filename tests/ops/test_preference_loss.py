"""The loss of a pair: what its formulas imply."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.preference_loss import (
    LOSSES,
    METRICS,
    Answers,
    preference_loss,
    preference_metrics,
)
from ascend_run.plugins.tasks import dpo, simpo

RATIOS = st.floats(-60.0, 60.0)
BETAS = st.floats(0.01, 2.0)


def answers(chosen: float, rejected: float) -> Answers:
    values = (torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected))
    return Answers(chosen_P=next(values), rejected_P=next(values))


def loss_of(kind: str, chosen: float, rejected: float, beta: float, e: float = 0.0) -> float:
    margin_P = answers(chosen, rejected).margin_P
    return float(preference_loss(kind, margin_P, beta=beta, smoothing=e))


def gradients_of(kind: str, chosen: float, rejected: float, beta: float) -> tuple[float, float]:
    ratios = answers(chosen, rejected)
    sides = (ratios.chosen_P.requires_grad_(), ratios.rejected_P.requires_grad_())
    loss = preference_loss(kind, ratios.margin_P, beta=beta).sum()
    of_chosen, of_rejected = torch.autograd.grad(loss, sides)
    return float(of_chosen), float(of_rejected)


@settings(max_examples=50, deadline=None)
@given(ratio=RATIOS, beta=BETAS, e=st.floats(0.0, 0.5))
def test_equal_ratios_cost_log_2_whatever_the_smoothing(
    ratio: float, beta: float, e: float
) -> None:
    assert loss_of("sigmoid", ratio, ratio, beta, e) == pytest.approx(math.log(2), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(chosen=RATIOS, rejected=RATIOS, beta=BETAS)
def test_sigmoid_is_the_logarithm_of_bradley_and_terry(
    chosen: float, rejected: float, beta: float
) -> None:
    z = beta * (chosen - rejected)
    wanted = math.log1p(math.exp(-abs(z))) + max(-z, 0.0)
    assert loss_of("sigmoid", chosen, rejected, beta) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@settings(max_examples=50, deadline=None)
@given(chosen=RATIOS, rejected=RATIOS, beta=BETAS, e=st.floats(0.0, 0.49))
def test_robust_is_unbiased_where_a_share_of_pairs_is_swapped(
    chosen: float, rejected: float, beta: float, e: float
) -> None:
    right = loss_of("robust", chosen, rejected, beta, e)
    swapped = loss_of("robust", rejected, chosen, beta, e)
    wanted = loss_of("sigmoid", chosen, rejected, beta)
    assert (1 - e) * right + e * swapped == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(chosen=RATIOS, rejected=RATIOS, beta=BETAS, e=st.floats(0.0, 0.5))
def test_smoothing_is_the_mean_over_swapped_pairs(
    chosen: float, rejected: float, beta: float, e: float
) -> None:
    right = loss_of("sigmoid", chosen, rejected, beta)
    swapped = loss_of("sigmoid", rejected, chosen, beta)
    wanted = (1 - e) * right + e * swapped
    assert loss_of("sigmoid", chosen, rejected, beta, e) == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(rejected=RATIOS, beta=BETAS, more=st.floats(0.0, 1e3))
def test_gradients_vanish_at_any_margin_that_saturates(
    rejected: float, beta: float, more: float
) -> None:
    """Hinge: from 1 / beta on. Sigmoid: where exp(-beta z) is below the smallest float64."""
    at_hinge, at_sigmoid = rejected + 1.001 / beta + more, rejected + (800.0 + more) / beta
    assert gradients_of("hinge", at_hinge, rejected, beta) == (0.0, 0.0)
    assert gradients_of("sigmoid", at_sigmoid, rejected, beta) == (0.0, 0.0)
    of_chosen, of_rejected = gradients_of("hinge", rejected + 0.999 / beta, rejected, beta)
    assert of_chosen == -of_rejected == -beta


def test_gradients_vanish_where_margins_saturate() -> None:
    assert gradients_of("sigmoid", 500.0, -500.0, 1.0) == (0.0, 0.0)
    assert gradients_of("hinge", 3.0, 0.0, 0.5) == (0.0, 0.0)
    assert gradients_of("hinge", 1.0, 0.0, 0.5) == (-0.5, 0.5)
    assert gradients_of("sigmoid", 2.0, 2.0, 0.1) == pytest.approx((-0.05, 0.05))


def test_a_hopeless_margin_stays_finite() -> None:
    assert loss_of("sigmoid", -1e4, 1e4, 1.0) == pytest.approx(2e4)


@settings(max_examples=50, deadline=None)
@given(beta=BETAS, rejected=st.floats(-5.0, 5.0))
def test_ipo_is_zero_at_its_margin(beta: float, rejected: float) -> None:
    chosen = rejected + 1 / (2 * beta)
    assert loss_of("ipo", chosen, rejected, beta) == pytest.approx(0.0, abs=1e-18)
    assert loss_of("ipo", chosen + 1.0, rejected, beta) == pytest.approx(1.0)


def test_metrics_are_those_of_each_pair() -> None:
    rewards = Answers(chosen_P=torch.tensor([1.0, 2.0]), rejected_P=torch.tensor([-3.0, 2.0]))
    found = preference_metrics(
        rewards=rewards, logps=rewards.scaled(0.5), lengths=rewards / rewards.scaled(0.25)
    )
    assert {name: values_P.tolist() for name, values_P in found.items()} == {
        "rewards/chosen": [1.0, 2.0],
        "rewards/rejected": [-3.0, 2.0],
        "rewards/margins": [4.0, 0.0],
        "rewards/accuracies": [1.0, 0.0],  # equal rewards prefer nothing
        "logps/chosen": [0.5, 1.0],
        "logps/rejected": [-1.5, 1.0],
        "lengths/chosen": [4.0, 4.0],
        "lengths/rejected": [4.0, 4.0],
    }
    assert tuple(found) == METRICS


def test_documents_are_chosen_and_rejected_in_turn() -> None:
    both = Answers.of_documents(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert both.chosen_P.tolist() == [1.0, 3.0]
    assert both.rejected_P.tolist() == [2.0, 4.0]


def test_each_task_offers_types_that_exist() -> None:
    assert dpo.LOSS_TYPES == LOSSES
    assert {*simpo.LOSS_TYPES} < {*LOSSES}
