"""What a small run is expected to cost, for tests that hold it against something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_run.core.config.raw import Given, RawConfig
from ascend_run.core.cost.estimate import RankCost, expected_costs
from ascend_run.core.hooks import Hooks
from ascend_run.entrypoints.planning import Prepared, prepare_raw


def planned(
    config: Mapping[str, Any], plugins: Sequence[str] = (), world_size: int = 1
) -> tuple[Prepared, tuple[RankCost, ...]]:
    """The run as ``plan`` sees it, and what it expects of each pipeline stage."""
    values = {"data.train": ["none"], "platform": "cpu", **config, "enable": [*plugins]}
    raw = RawConfig(values={key: Given(value, "the test") for key, value in values.items()})
    prepared = prepare_raw(raw, world_size)
    return prepared, expected_costs(prepared.config, prepared.layout, Hooks(prepared.instances()))


def sent_bytes(cost: RankCost, operation: str, group: str = "") -> float:
    """Bytes that one rank puts in, over all messages of an operation (and a group)."""
    return sum(
        m.sent_bytes for m in cost.messages if m.operation == operation and group in ("", m.group)
    )


def calls(cost: RankCost, operation: str, group: str = "") -> float:
    """The same, of calls."""
    return sum(
        m.calls for m in cost.messages if m.operation == operation and group in ("", m.group)
    )
