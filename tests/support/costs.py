"""The expected cost of a small run, for tests that compare it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_run.core.hooks import Hooks
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.plan.cost_model.estimate import RankCost, expected_costs


def planned(
    config: Mapping[str, Any], plugins: Sequence[str] = (), world_size: int = 1
) -> tuple[PreparedRun, tuple[RankCost, ...]]:
    """Return the run's plan and the expected cost of each pipeline stage."""
    values = {"data.train": ["none"], "platform": "cpu", **config, "enable": [*plugins]}
    raw = RawConfig(values={key: RawValue(value, "the test") for key, value in values.items()})
    prepared = prepare_raw(raw, world_size)
    return prepared, expected_costs(prepared.config, prepared.layout, Hooks(prepared.instances()))


def sent_bytes(cost: RankCost, operation: str, group: str = "") -> float:
    """Return the bytes one rank sends in all calls of an operation (and a group)."""
    return sum(
        m.sent_bytes
        for m in cost.communication
        if m.operation == operation and group in ("", m.group)
    )


def calls(cost: RankCost, operation: str, group: str = "") -> float:
    """Return the number of calls instead of bytes."""
    return sum(
        m.calls for m in cost.communication if m.operation == operation and group in ("", m.group)
    )
