"""What is expected of memory, against runs: the committed result, and a sample of it again."""

from __future__ import annotations

import json
import random
from importlib.metadata import entry_points
from typing import Any, Final

import attrs
import pytest

from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import EXAMPLES, MODELS, Case
from benchmarks.memory_layouts import CASES
from benchmarks.memory_prediction import RESULT, TOLERANCE, compare, is_exact, plan_of

SMALL = [case for case in CASES if case.ranks <= 2 and case.model in MODELS]
SAMPLE = [
    next(case for case in CASES if case.name == "examples/dense.toml"),
    *random.Random(4).sample(SMALL, 1),
]

GROUPS: Final = ("ascend_run.plugins.memory.", "ascend_run.plugins.optimizers.")
CHANGE_NO_BYTES: Final = {"comm-buffer-auto", "memory-fragmentation"}
"""On a CPU, which has neither buffers of communicators nor pools."""


def layouts_of(name: str) -> list[Case]:
    return [case for case in CASES if name in case.plugins and case.model in MODELS]


def compared() -> list[Any]:
    """Return the plugins of memory, the optimizers, and the plugin of communicators' buffers; each
    needs those that are beside it in its layouts."""
    found = entry_points(group="ascend_run.plugins")
    names = {one.name for one in found if one.value.startswith(GROUPS)}
    return [
        pytest.param(
            name,
            marks=pytest.mark.needs_plugins(
                *{p for case in layouts_of(name) for p in case.plugins}
            ),
        )
        for name in sorted(names | CHANGE_NO_BYTES)
    ]


def without(case: Case, name: str) -> Case:
    """Return the same run without a plugin and its options."""
    values = {k: v for k, v in case.values.items() if not k.startswith(f"plugins.{name}.")}
    plugins = tuple(plugin for plugin in case.plugins if plugin != name)
    return attrs.evolve(case, plugins=plugins, values=values)


@pytest.mark.parametrize("name", compared())
def test_each_plugin_of_memory_has_work_in_a_layout(name: str) -> None:
    """Its estimate differs from that without it, unless there is nothing that it could change."""
    cases = layouts_of(name)
    assert cases, f"{name}: no layout in benchmarks/memory_plugins.py"
    acts = []
    for case in cases:
        prepared, costs = plan_of(case)
        assert name not in prepared.plan.idle
        acts.append(costs != plan_of(without(case, name))[1])
    assert any(acts) is (name not in CHANGE_NO_BYTES), acts


def test_the_committed_result_is_of_every_layout_and_within_five_percent() -> None:
    result = json.loads(RESULT.read_text())
    assert result["layouts"] == len(CASES) >= 20
    assert {row["layout"] for row in result["rows"]} == {case.name for case in CASES}
    assert result["ranks"] == len(result["rows"]) == sum(case.ranks for case in CASES)
    assert result["passes"]
    assert result["worst"] <= TOLERANCE == 0.05
    for row in result["rows"]:
        expected, measured = row["peak"]
        assert abs(expected / measured - 1) <= TOLERANCE
        assert is_exact(row), row


def test_the_page_has_the_number_of_layouts() -> None:
    """Those of the two small models; the examples are beside them."""
    page = " ".join((EXAMPLES.parent / "docs/cost-model.md").read_text().split())
    small = [case for case in CASES if not case.name.startswith("examples/")]
    assert f"two small ones of their shapes in {len(small)} layouts on one to" in page


@pytest.mark.needs_plugins(*sorted({name for case in CASES for name in case.plugins}))
def test_the_committed_result_is_what_is_expected_now() -> None:
    committed = {
        (r["layout"], r["rank"]): r["peak"][0] for r in json.loads(RESULT.read_text())["rows"]
    }
    expected = {}
    for case in CASES:
        prepared, costs = plan_of(case)
        for rank in range(case.ranks):
            peak = costs[prepared.layout.coordinate("pp", rank)].memory.peak
            expected[case.name, rank] = round(peak)
    assert committed == expected, "run python -m benchmarks.memory_prediction again"


def test_the_examples_are_measured_as_they_are() -> None:
    for name in ("dense", "demo"):
        case = next(case for case in CASES if case.name == f"examples/{name}.toml")
        text = (EXAMPLES / f"{name}.toml").read_text()
        for key in ("num_layers", "hidden_size", "vocab_size"):
            assert f"\n{key} = {case.config[f'model.{key}']}\n" in text
        assert f"\nseq_length = {case.config['data.seq_length']}\n" in text


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.needs_plugins(*case.plugins))
        for case in SAMPLE
    ],
)
def test_a_run_takes_what_was_expected(gloo_pool: GlooPool, case: object) -> None:
    for row in compare(case, gloo_pool):  # type: ignore[arg-type]
        assert is_exact(row), row
        assert abs(row["off"]) <= TOLERANCE, row


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("weights", [100, 104]),
        ("gradient_buffers", [0, 4]),
        ("optimizer", [1000, 1002]),
        ("files", [0, 11]),
    ],
)
def test_what_lasts_must_be_exact(name: str, pair: list[int]) -> None:
    row = {"weights": [100, 100], "gradient_buffers": [0, 0], "optimizer": [10_000, 10_009]}
    row["files"] = [0, 0]
    assert is_exact(row)
    assert not is_exact({**row, name: pair})
