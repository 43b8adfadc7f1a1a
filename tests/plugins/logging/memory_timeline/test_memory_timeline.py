"""Bytes by category at the borders of phases, against what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run import testing
from ascend_run.plugin_api import Layout, Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.logging.memory_timeline import MemoryTimeline, MemoryTimelineConfig
from ascend_run.plugins.logging.memory_timeline.recording import Category
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from tests.support.costs import planned
from tests.support.saved_tensors import expected_bytes

from .jobs import kept_by_a_forward, left_behind, recorded

EVERY_BYTE: Final = {"plugins.memory-timeline.min_bytes": 1}
LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "one rank": {},
    "tp": {"parallel.tensor_model_parallel_size": 2},
    "pp": {"parallel.pipeline_model_parallel_size": 2},
}
Lines = list[dict[str, Any]]


def ends(lines: Lines, step: int, phase: str) -> Lines:
    """The last line of each time that a step is in a phase."""
    own = [line for line in lines if line["step"] == step]
    pairs = zip(own, [*own[1:], {"phase": ""}], strict=True)
    return [line for line, after in pairs if line["phase"] == phase != after["phase"]]


def values_of(layers: int, layout: Mapping[str, Any]) -> dict[str, Any]:
    return {**DENSE, **EVERY_BYTE, **layout, "model.num_layers": layers}


@pytest.mark.exhaustive(by=lambda layout: ())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_every_category_are_what_they_must_be(
    gloo_pool: GlooPool, tmp_path: Path, layout: str
) -> None:
    """The first pipeline stage has two forwards before its first backward, other ranks have one."""
    ranks = 1 if layout == "one rank" else 2
    waiting = 2 if layout == "pp" else 1
    activations, expected = [], []
    for layers in (2, 4):
        values = values_of(layers, LAYOUTS[layout])
        _, (cost, *_) = planned(values, ("memory-timeline",), ranks)
        ((lines, count), *_) = gloo_pool.run(recorded, ranks, values, tmp_path / f"{layers}")
        for line in ends(lines, 2, "update"):
            assert line["values"]["weights"] == 4 * cost.parameters
            assert line["values"]["gradients"] == 4 * cost.parameters
            assert line["values"]["optimizer"] == 8 * cost.parameters + 4 * count
        assert lines[0]["values"]["optimizer"] == 0  # before the first update
        assert lines[-1]["values"]["activations"] == 0
        forwards = ends(lines, 2, "forward")
        assert len(forwards) == len(ends(lines, 2, "backward")) == cost.rank.num_microbatches
        activations.append(forwards[waiting - 1]["values"]["activations"])
        expected.append(waiting * expected_bytes(cost) / cost.rank.num_microbatches)
    assert activations[1] - activations[0] == expected[1] - expected[0] > 0


def test_half_precision_has_master_weights_and_wide_gradients(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    values = values_of(2, {"train.precision": "bf16"})
    _, (cost,) = planned(values, ("memory-timeline",))
    ((lines, count),) = gloo_pool.run(recorded, 1, values, tmp_path)
    (line,) = ends(lines, 2, "update")
    assert line["values"]["weights"] == 2 * cost.parameters
    assert line["values"]["gradients"] == 4 * cost.parameters
    assert line["values"]["optimizer"] == (4 + 8) * cost.parameters + 4 * count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_of_modules_are_a_category(
    gloo_pool: GlooPool, tmp_path: Path, precision: str
) -> None:
    """Of each router a bias and a count of tokens for each expert, in float32; the buffers of data
    parallelism are gradients."""
    biased = {
        "model.moe_router_enable_expert_bias": True,
        "model.moe_router_score_function": "sigmoid",
    }
    values = {**MOE, **EVERY_BYTE, **biased, "train.precision": precision}
    _, (cost,) = planned(values, ("memory-timeline",))
    ((lines, _),) = gloo_pool.run(recorded, 1, values, tmp_path)
    num_layers, num_experts = values["model.num_layers"], values["model.num_moe_experts"]
    for line in lines:
        assert line["values"]["buffers"] == 2 * 4 * num_layers * num_experts
    (line,) = ends(lines, 2, "update")
    assert line["values"]["gradients"] == 4 * cost.parameters


def test_what_another_thread_releases_a_moment_later_is_no_activation(
    gloo_pool: GlooPool,
) -> None:
    assert gloo_pool.run(kept_by_a_forward, 1, 0.05) == [3 * 1024]


@pytest.mark.exhaustive(by=lambda model: [model])
@pytest.mark.parametrize(
    ("model", "layout"), [("dense", {}), ("moe", {}), ("dense", {"pp": 2})], ids=str
)
def test_no_bit_changes(parity: Parity, model: str, layout: Mapping[str, int]) -> None:
    parity("memory-timeline", model=model, layout=layout, options=EVERY_BYTE)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_nothing_that_a_step_saved_outlives_it(
    gloo_pool: GlooPool, model: Mapping[str, Any]
) -> None:
    without, _ = gloo_pool.run(left_behind, 1, model, ())[0]
    assert gloo_pool.run(left_behind, 1, model, ["memory-timeline"])[0] == (without, 0)


def test_a_run_writes_the_file_that_its_report_draws(tmp_path: Path) -> None:
    run = testing.run("memory-timeline", {**EVERY_BYTE, "plugins.memory-timeline.steps": [2]})
    page = tmp_path / "report.html"
    write_report([read_run(run.folder)], page)
    text = page.read_text()
    assert "Memory timeline: step 2" in text
    assert "Memory timeline: step 1" not in text
    assert all(name in text for name in (*Category, "backward", "update"))


def test_declarations() -> None:
    assert claims_of(MemoryTimeline) == ()
    assert MemoryTimeline.manifest.numerics is Numerics.BITWISE
    assert set(MemoryTimeline.manifest.conflicts) == {"compile"}


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"steps are counted from 1, got \[2, 0\]"):
        MemoryTimelineConfig(steps=(2, 0))
    for option in ("rank", "min_bytes"):
        with pytest.raises(ValueError, match=option):
            MemoryTimelineConfig(**{option: -1})
    problems = MemoryTimeline(MemoryTimelineConfig(rank=2)).ascend_check
    assert problems(layout=Layout(world_size=4)) == ()
    (problem,) = problems(layout=Layout(world_size=2))
    assert "plugins.memory-timeline.rank=2 is no rank of this run; use 0 to 1" in problem
