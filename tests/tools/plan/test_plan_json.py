"""``plan --json`` and ``plan.json`` keep their keys: scripts and reports of other versions read
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from tests.support.demo import DEMO, NEEDS_ITS_FEATURES

PLAN = (
    *("versions", "device", "plugins", "hooks", "forwards", "claims", "idle", "layout", "ranks"),
    *("process_groups", "environment", "patching", "panels", "origins"),
)
RECORDS = {
    "plugins": (
        *("name", "kind", "version", "distribution", "summary", "numerics", "maturity"),
        *("platforms", "claims", "hooks", "why"),
    ),
    "hooks": ("hook", "kind", "point", "owners", "why"),
    "forwards": ("module", "links", "compilers"),
    "ranks": ("rank", "tp", "cp", "dp", "pp", "ep"),
    "panels": ("title", "metrics", "unit"),
}
STAGE = (
    *("pp", "ranks", "layers", "parameters", "trained_parameters", "memory", "communication"),
    *("flops", "model_flops", "changed_by"),
)
MEMORY = (
    *("weights", "gradients", "optimizer", "activations", "buffers", "peak", "host", "moment"),
)
COLLECTIVE = (
    *("operation", "group", "group_size", "calls", "sent_bytes", "overlapped", "why", "seconds"),
)
TIME = (
    *("device", "source", "matmuls", "memory", "operations", "communication", "host_copies"),
    *("disk", "bubble", "step", "tokens_per_second", "mfu", "memory_bytes", "fits"),
)

pytestmark = NEEDS_ITS_FEATURES


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["plan", "--config", str(DEMO), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def keys(values: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(values)


def test_the_keys_of_a_plan_are_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--enable", "ulysses,gmm,swap-attention")
    assert keys(plan) == (*PLAN, "cost")
    assert keys(plan["layout"]) == ("world_size", "axes", "expert_axes", "groups", "stages")
    for name, expected in RECORDS.items():
        assert {keys(record) for record in plan[name]} == {expected}, name


@pytest.mark.needs_plugins("ring-attention")
def test_a_level_adds_its_members_before_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--level", "2")
    assert keys(plan) == (*PLAN, "level", "cost")
    assert keys(plan["level"]) == ("level", "members", "left_out")
    assert plan["level"]["level"] == 2
    assert "ring-attention" in plan["level"]["left_out"]


def test_the_keys_of_the_cost_are_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    cost = planned(capsys)["cost"]
    (stage,) = cost["stages"]
    assert keys(cost) == ("unit", "tokens", "stages", "time", "notes")
    assert keys(stage) == STAGE
    assert keys(stage["memory"]) == MEMORY
    assert {keys(collective) for collective in stage["communication"]} == {COLLECTIVE}
    assert keys(cost["time"]) == TIME


def test_a_platform_without_a_known_device_has_no_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascend_run.tools.plan.costs.device_of", lambda platform: None)
    cost = planned(capsys)["cost"]
    assert keys(cost) == ("unit", "tokens", "stages", "notes")
    (stage,) = cost["stages"]
    assert {keys(collective) for collective in stage["communication"]} == {COLLECTIVE[:-1]}
