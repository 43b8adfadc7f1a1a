"""A run on it is a run on the CPU, and what it counted is there. Needs it installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from ascend_run_metered_cpu import MeteredCpu, MeteredCpuConfig

from ascend_run.entrypoints.cli import run
from ascend_run.prepare.prepare import prepare
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial

LAYERS, MICRO_BATCHES = 2, 4
NORMS = (2 * LAYERS + 1) * MICRO_BATCHES
"""Two in a layer and one behind the last."""


def outcome_on(
    pool: GlooPool,
    platform: str,
    *,
    steps: int = 0,
    enable: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> RankOutcome:
    config = {**DENSE, "platform": platform, **(options or {})}
    trial = Trial(plugins=tuple(enable), config=config, steps=steps)
    (outcome,) = pool.run(run_trial, 1, trial, timeout=100)
    return outcome


@pytest.mark.parametrize("steps", [0, 3])
def test_gradients_and_trained_weights_are_those_of_the_cpu(
    gloo_pool: GlooPool, steps: int
) -> None:
    got, want = (outcome_on(gloo_pool, name, steps=steps) for name in ("metered-cpu", "cpu"))
    assert got.losses == want.losses
    for shard, expected in zip(got.shards, want.shards, strict=True):
        assert shard.name == expected.name
        assert torch.equal(shard.tensor, expected.tensor)


def test_calls_of_operators_are_counted(gloo_pool: GlooPool) -> None:
    metrics = outcome_on(gloo_pool, "metered-cpu").metrics
    assert metrics["metered-cpu/rms_norm_calls"] == NORMS
    assert metrics["metered-cpu/swiglu_calls"] == LAYERS * MICRO_BATCHES
    assert "metered-cpu/to_host_bytes" not in metrics


def test_a_feature_made_for_the_cpu_runs_on_it_and_its_copies_are_counted(
    gloo_pool: GlooPool,
) -> None:
    options = {
        "plugins.swap-attention.min_bytes": 1,
        "plugins.metered-cpu.operators": False,
    }
    swapping = outcome_on(gloo_pool, "metered-cpu", enable=["swap-attention"], options=options)
    metrics = swapping.metrics
    # What the last layer saved is still on the device when backward begins, and stays there.
    assert metrics["metered-cpu/to_host_bytes"] > 0
    assert metrics["metered-cpu/to_host_bytes"] == LAYERS * metrics["metered-cpu/to_device_bytes"]
    assert "metered-cpu/rms_norm_calls" not in metrics


def test_a_reading_begins_where_the_last_one_ended() -> None:
    plugin = MeteredCpu(MeteredCpuConfig())
    config = prepare(None, ["data.train=any", *(f"{key}={DENSE[key]}" for key in DENSE)]).config
    operators = plugin.ascend_platform_ops(config=config)
    operators.swiglu(torch.ones(2, 4))
    assert plugin.meter.take() == {"swiglu_calls": 1.0}
    assert plugin.meter.take() == {}


def test_it_is_planned_as_the_device_beside_a_feature_of_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [f"{key}={DENSE[key]}" for key in DENSE if key.startswith("model.")]
    chosen = ["--platform", "metered-cpu", "--enable", "swap-attention"]
    code = run(["plan", "--json", *chosen, "data.train=any", *sizes])
    hooks = {row["hook"]: row["owners"] for row in json.loads(capsys.readouterr().out)["hooks"]}
    assert code == 0
    assert hooks["ascend_device"] == ["metered-cpu"]


def test_two_platforms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--platform", "metered-cpu", "--enable", "cpu", "data.train=any"]) == 2
    assert "choose it with --platform" in capsys.readouterr().err
