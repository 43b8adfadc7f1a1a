"""Runs that recompute in bubbles against runs that keep everything: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome
from tests.plugins.memory.ahead_runs import outcomes, recomputed_layers

NAME: Final = "recompute-in-bubble"
NUMBER: Final = f"plugins.{NAME}.num_forwards"
STEPS: Final = 20
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
CHUNKS: Final = {
    "model.num_layers": 4,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.virtual_pipeline_model_parallel_size": 2,
}
TENSORS: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


runs = partial(outcomes, NAME)
counts = partial(recomputed_layers, NAME)


def test_twenty_steps_with_dropout_change_no_bit(gloo_pool: GlooPool) -> None:
    config = {**DENSE, **CHUNKS, **DROPOUT, "train.train_iters": STEPS}
    plain, ours = runs(gloo_pool, config, steps=STEPS)
    assert [*compare(ours, plain, 0.0)] == []
    assert len(ours[0].losses) == STEPS
    assert [counts(outcome) for outcome in ours] == [(1, 0), (0, 0)]


@pytest.mark.exhaustive(by=lambda config: [config["model.family"]])
@pytest.mark.parametrize(
    ("config", "ahead"),
    [
        ({**DENSE, **CHUNKS, "model.num_layers": 8, NUMBER: 2}, [(10, 0), (4, 0)]),
        ({**DENSE, **CHUNKS, NUMBER: 1, "train.global_batch_size": 8}, [(15, 0), (8, 0)]),
        ({**DENSE, **CHUNKS, NUMBER: 9}, [(0, 0), (0, 0)]),
        ({**MOE, **CHUNKS, NUMBER: 2}, [(5, 0), (2, 0)]),
    ],
    ids=["two forwards", "one forward", "all", "experts"],
)
def test_gradients_change_no_bit(
    gloo_pool: GlooPool, config: Mapping[str, Any], ahead: list[tuple[float, float]]
) -> None:
    """Where nothing is waited for, the forward before a backward is its own, and is kept."""
    plain, ours = runs(gloo_pool, {**config, **DROPOUT})
    assert [*compare(ours, plain, 0.0)] == []
    assert [counts(outcome) for outcome in ours] == ahead
    for one, other, pair in zip(ours, plain, ahead, strict=True):
        forwards = config.get("model.num_layers", 4) // 2 * config.get("train.global_batch_size", 4)
        a_forward = other.operations["silu"] // forwards
        assert one.operations["silu"] - other.operations["silu"] == sum(pair) * a_forward


@pytest.mark.needs_plugins("recompute-comm-opt")
def test_sums_are_left_out_where_a_forward_is_recomputed(gloo_pool: GlooPool) -> None:
    """A recomputed layer repeats no sum over tensor ranks, and a kept forward has all of its own:
    there are as many as without recomputation."""
    level = {"plugins.recompute-comm-opt.level": 2}
    config = {**DENSE, **CHUNKS, **DROPOUT, **TENSORS, **level, NUMBER: 2}
    plain, ours = runs(gloo_pool, config, ("recompute-comm-opt",), ranks=4)
    assert [*compare(ours, plain, 0.0)] == []
    assert {counts(outcome) for outcome in ours} == {(5, 0), (2, 0)}
    assert [*map(sums, ours)] == [*map(sums, plain)]


def sums(outcome: RankOutcome) -> int:
    """Return the sums over tensor ranks, each of which leaves a rank its rows."""
    names = ("_reduce_scatter_base_", "reduce_scatter_")
    return sum(outcome.collectives.get(name, 0) for name in names)
