"""The plugin's declarations, errors, warnings and what is planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ascend_run import testing
from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import AscendRunError, ConfigError, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.adaptive_recompute import (
    AdaptiveRecompute,
    AdaptiveRecomputeConfig,
)
from ascend_run.plugins.memory.adaptive_recompute.expected import choices
from ascend_run.plugins.memory.adaptive_recompute.layer import NEVER
from ascend_run.plugins.memory.adaptive_recompute.treatment import PARTS
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from ascend_run.tools.report.row_tables import tables_of
from tests.support.costs import planned
from tests.support.saved_tensors import expected_bytes
from tests.support.small_runs import training

NAME = "adaptive-recompute"
BUDGET = f"plugins.{NAME}.activation_mb"
MIB = 1 << 20


def planned_bytes(values: Mapping[str, Any], *plugins: str) -> float:
    prepared, (cost,) = planned({**DENSE, "train.global_batch_size": 1, **values}, plugins)
    policies = activation_policies(prepared.config, Hooks(prepared.instances()))
    return expected_bytes(cost, policies)


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(AdaptiveRecompute) == ()
    assert AdaptiveRecompute.manifest.numerics is Numerics.BITWISE


@pytest.mark.parametrize(
    "options", [{"activation_mb": 0.0}, {"profiled_steps": 0}, {"min_bytes": 0}], ids=str
)
def test_options_out_of_range_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaptiveRecomputeConfig(**options)


def test_a_budget_must_be_given() -> None:
    with pytest.raises(ConfigError, match=rf"{BUDGET} is not set; give the MiB"):
        planned(DENSE, (NAME,))


def test_a_folder_that_does_not_exist_is_refused() -> None:
    missing = rf"{NAME}: plugins.{NAME}.folder=/nowhere is not an existing folder; create it"
    with pytest.raises(ConfigError, match=missing):
        planned({**DENSE, BUDGET: 1.0, f"plugins.{NAME}.folder": "/nowhere"}, (NAME,))


@pytest.mark.needs_plugins("recompute")
def test_plan_counts_less_than_the_inputs_where_parts_are_swapped(tmp_path: Path) -> None:
    swapping = {f"plugins.{NAME}.folder": str(tmp_path), f"plugins.{NAME}.min_bytes": 1}
    inputs = planned_bytes({}, "recompute")
    budget = {BUDGET: 0.3 * inputs / MIB}
    assert planned_bytes(budget, NAME) == pytest.approx(inputs)
    assert planned_bytes({**budget, **swapping}, NAME) == pytest.approx(0.3 * inputs, abs=1)


@pytest.mark.needs_plugins("recompute", "recompute-activation", "recompute-norm", "swap-attention")
@pytest.mark.parametrize(
    "other", ["recompute", "recompute-activation", "recompute-norm", "swap-attention"]
)
def test_what_treats_activations_otherwise_is_refused(other: str) -> None:
    with pytest.raises(AscendRunError, match=f"'{NAME}' cannot run with '{other}'"):
        planned({**DENSE, BUDGET: 1.0}, (NAME, other))


@pytest.mark.parametrize(
    "values",
    [{"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]}],
    ids=["selective"],
)
def test_recomputation_of_megatron_is_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"within what {NAME} recomputes already"):
        planned({**DENSE, **values, BUDGET: 1.0}, (NAME,))


@pytest.mark.needs_plugins("recompute")
def test_plan_counts_whole_parts_within_the_budget() -> None:
    """Of two layers: everything, one without its MLP's tensors, both without, the inputs only."""
    everything, inputs = planned_bytes({}), planned_bytes({}, "recompute")
    tensors = planned({**DENSE, "train.global_batch_size": 1})[1][0].rank.saved[0]
    of_mlp = sum(t.nbytes for t in tensors if t.part == "mlp" and t.name != "input")

    def within(nbytes: float) -> float:
        return planned_bytes({BUDGET: nbytes / MIB}, NAME)

    assert within(1000 * MIB) == within(everything + 1) == pytest.approx(everything)
    assert within(everything - 0.9 * of_mlp) == pytest.approx(everything - of_mlp)
    assert within(everything - 1.9 * of_mlp) == pytest.approx(everything - 2 * of_mlp)
    assert within(inputs + 1) == within(0.9 * inputs) == pytest.approx(inputs)


@pytest.mark.parametrize("chunks", [None, 2])
def test_plan_keeps_to_the_budget_over_the_forwards_in_flight(chunks: int | None) -> None:
    pipeline = {
        "model.num_layers": 4,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.virtual_pipeline_model_parallel_size": chunks,
        "train.global_batch_size": 8,
    }
    in_flight = {None: ((2, 2), (1, 1)), 2: ((3, 2), (2, 1))}[chunks]  # of both layers of a rank
    for mib in (0.05, 0.1, 0.15, 0.2):
        _, costs = planned({**DENSE, **pipeline, BUDGET: mib}, (NAME,), 2)
        for cost, counts in zip(costs, in_flight, strict=True):
            kept = dict.fromkeys(cost.rank.layers, 0.0)
            for change in cost.changes[NAME].saved:
                for layer in change.layers:
                    saved = cost.rank.saved[layer]
                    kept[layer] = sum(t.nbytes for t in saved if t.key in change.tensors)
            inputs = [cost.rank.saved[layer][0].nbytes for layer in kept]
            pairs = zip(kept.values(), inputs, strict=True)
            total = sum((a + b) * count for (a, b), count in zip(pairs, counts, strict=True))
            least = sum(b * count for b, count in zip(inputs, counts, strict=True))
            assert total <= max(least, mib * MIB)


def choices_of_a_run(values: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return for each layer treatment -> bytes that it keeps, as measured. A rank's job."""
    with training(values, (NAME,)) as run:
        run.step_with_events()
        (plugin,) = (one for one in run.hooks.plugins if one.manifest.name == NAME)
        tuner: Any = plugin
        layers = tuner._tuner.recorder.layers
        return [{how.words: n for how, n in layer.nbytes.items() if n < NEVER} for layer in layers]


@pytest.mark.parametrize(("model", "off"), [(DENSE, 0.0), (MOE, 0.005)], ids=["dense", "experts"])
def test_plan_knows_the_bytes_of_every_choice(
    gloo_pool: GlooPool, model: Mapping[str, Any], off: float
) -> None:
    """Of experts it counts a few bytes more for the router's scores and indices of 32 tokens."""
    values = {**model, BUDGET: 1000.0, "model.moe_router_force_load_balancing": True}
    (found,) = gloo_pool.run(choices_of_a_run, 1, values)
    _, (cost,) = planned(values, (NAME,))
    spent = dict.fromkeys(PARTS, 1.0)
    for layer, measured in enumerate(found):
        expected = {
            c.treatment.words: c.nbytes for c in choices(cost.rank.saved[layer], spent, 1.0)
        }
        assert measured.keys() <= expected.keys()
        assert len(measured) > 8
        of_a_run = {words: expected[words] for words in measured}
        assert measured == pytest.approx(of_a_run, rel=off, abs=0)


def logged(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what three steps log. A rank's job."""
    with training(values, (NAME,)) as run, capture_logs() as events:
        for _ in range(3):
            run.step_with_events()
    return [dict(event) for event in events if event["event"].startswith(NAME)]


def test_the_log_has_what_was_chosen_and_why(gloo_pool: GlooPool) -> None:
    values = {**DENSE, f"plugins.{NAME}.profiled_steps": 1, BUDGET: 0.001}
    ((chosen, over, measured),) = gloo_pool.run(logged, 1, values)
    inputs = 2 * 16 * 32 * 4
    assert chosen["layers"] == {"0": "layer", "1": "layer"}
    assert chosen["expected_bytes"] == measured["bytes"] == measured["expected_bytes"] == inputs
    (kind,) = chosen["measured"]
    assert (kind["layers"], kind["in_flight"]) == ([0, 1], 1)
    assert kind["choices"]["nothing"]["milliseconds"] == 0
    assert kind["choices"]["layer"]["bytes"] == inputs // 2
    assert kind["choices"]["layer"]["milliseconds"] > 0
    assert over["log_level"] == "warning"
    assert over["fix"].endswith(f"activation_mb to at least {inputs / MIB:.6g}")


def test_a_run_writes_the_tables_of_its_report(tmp_path: Path) -> None:
    """With the numbers of the log: kept before and after, chosen, and from what."""
    run = testing.run(NAME, steps=4)
    lines = map(json.loads, (run.folder / "log.jsonl").read_text().splitlines())
    events = {line["event"].removeprefix(f"{NAME}."): line for line in lines}
    page = tmp_path / "report.html"
    write_report([read_run(run.folder)], page)
    found = tables_of([read_run(run.folder)])
    ((kept, chosen, choices),) = (panel.tables for panel in found)
    assert all(table.title in page.read_text() for table in (kept, chosen, choices))
    numbers = {what: number.replace(",", "") for what, number in kept.rows}
    (kind,) = events["chosen"]["measured"]
    by_choice = {words: kind["choices"][words]["bytes"] for words in ("nothing", "layer")}
    all_layers = {words: len(kind["layers"]) * size for words, size in by_choice.items()}
    assert all_layers["layer"] < events["measured"]["bytes"] < all_layers["nothing"]
    assert numbers == {
        "measured before": str(all_layers["nothing"]),
        "budget": str(events["chosen"]["budget_bytes"]),
        "least that can be kept": str(all_layers["layer"]),
        "expected of the choice": str(events["chosen"]["expected_bytes"]),
        "measured with it": str(events["measured"]["bytes"]),
    }
    layers = events["chosen"]["layers"]
    assert [row[:2] for row in chosen.rows] == [*layers.items()]
    assert [row[1] for row in choices.rows] == [*kind["choices"]]


def test_legacy_flags() -> None:
    flags = {flag.flag: flag.key for flag in AdaptiveRecompute.manifest.legacy_flags}
    assert flags == {
        "--adaptive-recompute-device-swap": "enable",
        "--adaptive-recompute-device-size": BUDGET,
        "--adaptive-recompute-profiling-step": f"plugins.{NAME}.profiled_steps",
    }
