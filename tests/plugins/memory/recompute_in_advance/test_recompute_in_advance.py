"""The plugin's declarations, errors and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from ascend_run.plugin_api import AscendRunError, ConfigError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.recompute_in_advance import (
    RecomputeInAdvance,
    RecomputeInAdvanceConfig,
)
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import TOLERANCE, compare
from tests.support.costs import planned
from tests.support.small_runs import training
from tests.support.tiny_options import planned_with

NAME: Final = "recompute-in-advance"
NUMBER: Final = f"plugins.{NAME}.num_layers"
CHUNKED: Final = "parallel.virtual_pipeline_model_parallel_size"
CHUNKS: Final = {
    "model.num_layers": 8,
    "parallel.pipeline_model_parallel_size": 2,
    CHUNKED: 2,
}
LISTED: Final = {"model.pipeline_model_parallel_layout": "Et|ttt|tt|ttL"}

OVERLAPPED: Final = {"parallel.overlap_p2p_comm": True, "parallel.batch_p2p_comm": False}
"""The plugin's defaults, for the run without it."""


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(RecomputeInAdvance) == ()
    assert RecomputeInAdvance.manifest.numerics is Numerics.BITWISE
    assert {*planned_with(NAME).plan.idle} == {NAME}


def test_a_number_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        RecomputeInAdvanceConfig(num_layers=0)


@pytest.mark.needs_plugins("recompute-in-bubble", "adaptive-recompute")
@pytest.mark.parametrize("other", ["recompute-in-bubble", "adaptive-recompute"])
def test_another_choice_of_what_is_recomputed_is_refused(other: str) -> None:
    with pytest.raises(
        AscendRunError, match=f"'{NAME}' cannot run with '{other}'|'{other}' cannot"
    ):
        planned_with(f"{NAME},{other}")


@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel.overlap_p2p_comm": False}, "with parallel.overlap_p2p_comm=false nothing can"),
        ({"parallel.batch_p2p_comm": True}, "with parallel.batch_p2p_comm=true nothing can"),
        ({"parallel.deallocate_pipeline_outputs": True}, "outputs=true frees .* leave it out"),
        ({**LISTED, CHUNKED: None}, f"lists 2 chunks for each rank; set {CHUNKED}=2 beside it"),
        ({"plugins.recompute.method": "uniform"}, "what Megatron recomputes itself"),
        ({"plugins.recompute.granularity": "selective", "plugins.recompute.modules": ["core_attn"]},
         "what Megatron recomputes itself"),
    ],
    ids=["no overlap", "batched", "freed outputs", "listed chunks", "groups", "scores"],
)  # fmt: skip
def test_what_it_could_not_do_is_refused(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned({**DENSE, **CHUNKS, **values}, ("recompute", NAME), 2)


def test_sends_are_overlapped_by_default() -> None:
    prepared, _ = planned({**DENSE, **CHUNKS}, (NAME,), 2)
    parallel = prepared.config.parallel
    assert (parallel.overlap_p2p_comm, parallel.batch_p2p_comm) == (True, False)


@pytest.mark.parametrize("values", [{}, CHUNKS, {**CHUNKS, **LISTED}], ids=["one", "two", "listed"])
def test_the_schedule_is_wrapped_if_there_are_chunks(values: Mapping[str, Any]) -> None:
    prepared, _ = planned({**DENSE, **values}, (NAME,), 2)
    plugin = RecomputeInAdvance(RecomputeInAdvanceConfig())
    assert (plugin.ascend_schedule(config=prepared.config) is None) == (not values)
    assert ({*prepared.plan.idle} == {NAME}) == (not values)


def idle_reasons(plugins: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    """Return what the plugin says before a run. A rank's job."""
    with capture_logs() as logs, training({**DENSE, **CHUNKS, **values}, plugins) as run:
        run.hooks.event("ascend_before_run")(context=run.context)
    return [entry["changes_nothing_as"] for entry in logs if entry["event"] == "plugin.idle"]


@pytest.mark.needs_plugins("recompute")
def test_without_recomputed_layers_it_says_that_it_changes_nothing(gloo_pool: GlooPool) -> None:
    modules = {"plugins.recompute.granularity": "selective"}
    why = ["this rank recomputes no whole layer; enable recompute"]
    assert gloo_pool.run(idle_reasons, 2, ("recompute", NAME), modules) == [why, why]
    assert gloo_pool.run(idle_reasons, 2, ("recompute", NAME), {}) == [[], []]


@pytest.mark.exhaustive(by=lambda number: ())
@pytest.mark.needs_plugins("recompute")
@pytest.mark.parametrize("number", [None, 1])
def test_a_run_takes_the_memory_that_was_expected(gloo_pool: GlooPool, number: int | None) -> None:
    """With one layer, no more than without the plugin."""
    values = {**CHUNKS, "data.seq_length": 64, "train.global_batch_size": 16, NUMBER: number}
    values |= OVERLAPPED
    case = Case(name=NAME, ranks=2, plugins=("recompute", NAME), values=values)
    first, last = compare(case, gloo_pool)
    assert max(abs(first["off"]), abs(last["off"])) <= TOLERANCE, (first, last)
    plain = {key: value for key, value in case.config.items() if key != NUMBER}
    _, costs = planned(plain, ("recompute",), 2)
    more = first["peak"][0] - round(costs[0].memory.peak)
    layer = sum(t.nbytes for t in costs[0].rank.saved[0]) - costs[0].rank.saved[0][0].nbytes
    assert more == (0 if number else layer)


def test_legacy_flags() -> None:
    flags = [(f.flag, f.key) for f in RecomputeInAdvance.manifest.legacy_flags]
    assert flags == [("--recompute-in-advance", "enable")]
