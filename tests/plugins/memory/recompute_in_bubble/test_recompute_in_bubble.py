"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.plugin_api import AscendRunError, ConfigError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.recompute_in_bubble import (
    RecomputeInBubble,
    RecomputeInBubbleConfig,
)
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import TOLERANCE, compare
from tests.support.costs import planned
from tests.support.tiny_options import planned_with

NAME: Final = "recompute-in-bubble"
NUMBER: Final = f"plugins.{NAME}.num_forwards"
CHUNKED: Final = "parallel.virtual_pipeline_model_parallel_size"
CHUNKS: Final = {
    "model.num_layers": 4,
    "parallel.pipeline_model_parallel_size": 2,
    CHUNKED: 2,
}
LISTED: Final = {"model.pipeline_model_parallel_layout": "Et|t|t|tL"}
OTHERS: Final = (
    "adaptive-recompute",
    "recompute",
    "recompute-activation",
    "recompute-norm",
    "swap-attention",
)

OVERLAPPED: Final = {"parallel.overlap_p2p_comm": True, "parallel.batch_p2p_comm": False}
"""The plugin's defaults, for the run without it."""


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(RecomputeInBubble) == ()
    assert RecomputeInBubble.manifest.numerics is Numerics.BITWISE
    assert {*planned_with(NAME).plan.idle} == {NAME}


def test_a_number_of_no_forwards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_forwards"):
        RecomputeInBubbleConfig(num_forwards=0)


@pytest.mark.needs_plugins(*OTHERS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_treats_activations_otherwise_is_refused(other: str) -> None:
    with pytest.raises(AscendRunError, match=f"'{NAME}' cannot run with '{other}'"):
        planned({**DENSE, **CHUNKS}, (NAME, other), 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel.overlap_p2p_comm": False}, "with parallel.overlap_p2p_comm=false nothing can"),
        ({"parallel.batch_p2p_comm": True}, "with parallel.batch_p2p_comm=true nothing can"),
        ({"parallel.deallocate_pipeline_outputs": True}, "outputs=true frees .* leave it out"),
        ({**LISTED, CHUNKED: None}, f"lists 2 chunks for each rank; set {CHUNKED}=2 beside it"),
        (
            {"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]},
            f"within what {NAME} recomputes already",
        ),
        (
            {
                "model.recompute_granularity": "full",
                "model.recompute_method": "block",
                "model.recompute_num_layers": 1,
            },
            "both treat the activations of a whole layer",
        ),
    ],
    ids=["no overlap", "batched", "freed outputs", "listed chunks", "selective", "full"],
)
def test_what_it_could_not_do_is_refused(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned({**DENSE, **CHUNKS, **values}, (NAME,), 2)


@pytest.mark.parametrize("values", [{}, CHUNKS, {**CHUNKS, **LISTED}], ids=["one", "two", "listed"])
def test_the_schedule_is_wrapped_if_there_are_chunks(values: Mapping[str, Any]) -> None:
    prepared, _ = planned({**DENSE, **values}, (NAME,), 2)
    plugin = RecomputeInBubble(RecomputeInBubbleConfig())
    assert (plugin.ascend_schedule(config=prepared.config) is None) == (not values)
    assert ({*prepared.plan.idle} == {NAME}) == (not values)


@pytest.mark.parametrize("number", [None, 2])
def test_a_run_takes_the_memory_that_was_expected(gloo_pool: GlooPool, number: int | None) -> None:
    """The first rank has five forwards in flight."""
    values = {**CHUNKS, **OVERLAPPED, "data.seq_length": 64, "train.global_batch_size": 16}
    values[NUMBER] = number
    case = Case(name=NAME, ranks=2, plugins=(NAME,), values=values)
    first, last = compare(case, gloo_pool)
    assert max(abs(first["off"]), abs(last["off"])) <= TOLERANCE, (first, last)
    _, (plain, _) = planned({k: v for k, v in case.config.items() if k != NUMBER}, (), 2)
    layer = sum(t.nbytes for t in plain.rank.saved[0]) - plain.rank.saved[0][0].nbytes
    assert round(plain.memory.peak) - first["peak"][0] == (5 - (number or 4)) * layer


@pytest.mark.parametrize(("number", "again"), [(None, 1), (2, 5), (9, 0)])
def test_plan_counts_the_forwards_that_are_recomputed(number: int | None, again: int) -> None:
    values = {**DENSE, **CHUNKS}
    block = {"granularity": "full", "method": "block", "num_layers": 1}
    _, (cost, _) = planned({**values, NUMBER: number}, (NAME,), 2)
    _, (plain, _) = planned(values, (), 2)
    _, (full, _) = planned(
        {**values, **{f"model.recompute_{k}": v for k, v in block.items()}}, (), 2
    )
    forward = (full.flops - plain.flops) / 8
    assert cost.flops - plain.flops == pytest.approx(again * forward)
    sent = [sum(m.calls for m in one.communication if m.group == "tp") for one in (cost, plain)]
    assert sent[0] == sent[1]


def test_legacy_flags() -> None:
    flags = [(f.flag, f.key) for f in RecomputeInBubble.manifest.legacy_flags]
    assert flags == [("--recompute-in-bubble", "enable")]
