"""An MLP with adapters against the formula on full tensors; what it keeps and when it sends."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from ascend_run.ops.linear.adapted_linear import Schedule
from ascend_run.ops.linear.adapted_mlp import AdaptedMlp, MlpLinear, adapted_mlp
from ascend_run.ops.linear.parallel_linear import LinearCollectives
from ascend_run.testing.pool import GlooPool

from . import adapted_mlp_jobs as jobs
from .made_weight import MadeWeight

ITEM = 8
"""Bytes of float64."""


@pytest.mark.exhaustive(by=lambda ranks, kind: [ranks, kind.over])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "kind",
    [
        jobs.Kind(over=over, **more)
        for over in jobs.OVER_RANKS
        for more in ({}, {"slices": 3}, {"merges": True}, {"drops": True})
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_full_tensors(
    gloo_pool: GlooPool, ranks: int, kind: jobs.Kind
) -> None:
    split = 1 if kind.over == "none" else ranks
    for found in gloo_pool.run(jobs.errors, ranks, kind):
        saved = found.pop("saved")
        assert {*found} == {"y", *(f"d{name}" for name in jobs.LEAVES)}
        assert max(found.values()) < 1e-13, found
        # What the first adapter reads, the output of fc1, and the outputs of both A.
        tokens, shared = jobs.S * jobs.B, split if kind.over == "sequence" else 1
        own = tokens // shared
        narrow = (own if kind.merges else tokens) * jobs.R1 + own * jobs.R2
        kept = own * jobs.HIDDEN + tokens * jobs.WIDTH // split if kind.drops else 0
        wide = own * jobs.HIDDEN + tokens * 2 * jobs.WIDTH // split
        assert saved == (wide + narrow) * ITEM + kept


def words(line: str) -> list[str]:
    return [word.strip() for word in line.split(",")]


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        (
            jobs.Kind(over="sequence"),
            "gather H, gather R1, wait H, wait R1, scatter R2, scatter H, wait R2, wait H",
            "gather H, wait H, scatter R1, scatter H, wait R1, wait H",
        ),
        (
            jobs.Kind(over="sequence", merges=True),
            "gather H, wait H, scatter R2, scatter H, wait R2, wait H",
            "gather R1, gather H, wait H, scatter R1, scatter H, wait R1, wait R1, wait H",
        ),
        (
            jobs.Kind(over="tensors"),
            "reduce R2, reduce H, wait R2, wait H",
            "reduce R1, reduce H, wait R1, wait H",
        ),
    ],
    ids=str,
)
def test_collectives_of_one_rank_in_order(
    gloo_pool: GlooPool, kind: jobs.Kind, forward: str, backward: str
) -> None:
    for found in gloo_pool.run(jobs.sequence, 2, kind):
        assert found == (words(forward), words(backward))


def linear(**more: Any) -> MlpLinear:
    no_group: Any = None  # it is refused before any collective
    schedule = Schedule(collectives=LinearCollectives.NONE, group=no_group)
    given: dict[str, Any] = {
        "make_weight_NK": lambda: torch.ones(2, 2),
        "a_RK": torch.ones(1, 2),
        "parts": [torch.ones(1, 2)],
        "make_b_RN": lambda parts: parts[0],
        "schedule": schedule,
        "dropped": lambda x: x,
    }
    return MlpLinear(**{**given, **more})


def test_a_trained_weight_is_an_error() -> None:
    trained = linear(make_weight_NK=lambda: torch.ones(2, 2, requires_grad=True))
    mlp = AdaptedMlp(fc1=linear(), fc2=trained, activation=torch.relu)
    with pytest.raises(ValueError, match="the weight of fc2 is frozen"):
        adapted_mlp(torch.ones(4, 2), mlp)


def test_a_trained_bias_is_an_error() -> None:
    """Its gradient would be lost."""
    trained = torch.ones(2, requires_grad=True)
    mlp = AdaptedMlp(fc1=linear(), fc2=linear(), activation=torch.relu, bias_N=trained)
    with pytest.raises(ValueError, match="the bias of fc1 is frozen"):
        adapted_mlp(torch.ones(4, 2), mlp)


def test_an_adapter_with_dropout_cannot_be_merged() -> None:
    merged = attrs.evolve(linear().schedule, merges=True)
    mlp = AdaptedMlp(fc1=linear(schedule=merged, dropout=0.5), fc2=linear(), activation=torch.relu)
    with pytest.raises(ValueError, match=r"the adapter of fc1 .* dropout=0.5; it cannot be merged"):
        adapted_mlp(torch.ones(4, 2), mlp)


def test_one_rank_without_dropout_agrees_in_bf16() -> None:
    """Within a unit of the last place of the largest output."""
    generator = torch.Generator().manual_seed(1)
    w1, w2, x = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 4), (4, 4), (6, 4))
    )
    mlp = AdaptedMlp(
        fc1=linear(make_weight_NK=lambda: w1, a_RK=x[:1], parts=[x.new_zeros(1, 8)]),
        fc2=linear(make_weight_NK=lambda: w2, a_RK=x[:1], parts=[x.new_zeros(1, 4)]),
        activation=jobs.swiglu,
    )
    assert torch.equal(adapted_mlp(x, mlp), jobs.swiglu(x @ w1.t()) @ w2.t())


def test_weights_that_are_made_are_not_kept() -> None:
    """Of one that is stored in another form: one at a time, in forward and in backward."""
    made = MadeWeight(torch.ones(2, 2))
    parts = [torch.ones(1, 2, requires_grad=True)]
    fc1, fc2 = (linear(make_weight_NK=made, parts=parts) for _ in range(2))
    out = adapted_mlp(torch.ones(4, 2), AdaptedMlp(fc1=fc1, fc2=fc2, activation=torch.relu))
    assert (made.calls, made.most, made.living) == (2, 1, 0)
    out.sum().backward()
    assert (made.calls, made.most, made.living) == (4, 1, 0)
