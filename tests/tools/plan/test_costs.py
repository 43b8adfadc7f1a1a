"""What a run is expected to cost, as ``plan`` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.entrypoints.cli import run
from ascend_run.testing.models import DENSE, MOE
from ascend_run.tools.plan.cost_text import cost_lines, count, flops, seconds, size
from ascend_run.tools.plan.costs import cost_data
from ascend_run.types import layout as layout_module
from tests.support.costs import planned
from tests.support.fake_plugins import plugin

EXAMPLE = Path(__file__).parents[3] / "examples" / "dense.toml"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", "--config", str(EXAMPLE), *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_shows_memory_flops_and_time_on_the_platforms_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = plan(capsys)
    assert "estimated memory of one rank" in page
    assert "estimated FLOPs of one rank" in page
    assert "estimated step time on cpu:" in page
    assert "estimated communication" not in page  # one rank has no peer


def test_another_device_can_be_named_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "estimated step time on h200:" in plan(capsys, "--device", "h200")
    assert run(["plan", "--config", str(EXAMPLE), "--device", "h20"]) == 2
    assert "expected one of ascend-910b, h100, h200, cpu" in capsys.readouterr().err


def test_the_parts_of_memory_add_up_to_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    cost = json.loads(plan(capsys, "--json"))["cost"]
    memory = cost["stages"][0]["memory"]
    parts = sum(
        memory[name] for name in ("weights", "gradients", "optimizer", "activations", "buffers")
    )
    assert parts == pytest.approx(memory["peak"], abs=3)
    assert cost["time"]["fits"] is True


def test_stages_that_expect_the_same_are_one_row() -> None:
    config = {
        **DENSE,
        "parallel.pipeline_model_parallel_size": 4,
        "model.num_layers": 4,
        "train.global_batch_size": 8,
    }
    prepared, _ = planned(config, world_size=4)
    hooks = Hooks(prepared.instances())
    lines = list(cost_lines(cost_data(prepared.config, prepared.layout, hooks)))
    sends = [line.split() for line in lines if " send " in line]
    assert [row[0] for row in sends] == ["0", "1", "3"]
    assert sends[1][1:3] == ["to", "2"]


@pytest.mark.needs_plugins("gmm")
def test_thousands_of_ranks_are_counted_once_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        **MOE,
        "model.num_layers": 96,
        "parallel.tensor_model_parallel_size": 8,
        "model.num_query_groups": 8,
        "data.seq_length": 128,
        "parallel.sequence_parallel": True,
        "parallel.pipeline_model_parallel_size": 12,
        "parallel.virtual_pipeline_model_parallel_size": 4,
        "parallel.expert_model_parallel_size": 4,
        "ddp.use_distributed_optimizer": True,
        "train.global_batch_size": 83 * 24,
    }
    prepared, _ = planned(config, ("gmm",), 7968)
    asked: list[int] = []
    counting = plugin("counting", {"ascend_cost": lambda self, rank: asked.append(rank.pp_rank)})
    monkeypatch.setattr(layout_module, "rank_lists", None)  # no group is listed rank by rank

    hooks = Hooks([*prepared.instances(), counting()])
    data = cost_data(prepared.config, prepared.layout, hooks, "ascend-910b")

    assert asked == [*range(12)]
    assert [stage.ranks for stage in data.stages] == [664] * 12


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(512), "512 B"),
        (size(1536), "1.50 KiB"),
        (size(3 * 2**50), "3072.00 TiB"),
        (count(999), "999"),
        (count(6.74e9), "6.74 billion"),
        (flops(3.2e12), "3.20 TFLOP"),
        (seconds(0.0123), "12.30 ms"),
        (seconds(2), "2.00 s"),
    ],
)
def test_numbers_are_shown_in_units_for_people(shown: str, expected: str) -> None:
    assert shown == expected
