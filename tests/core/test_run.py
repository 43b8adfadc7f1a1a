"""What a run says before it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs


def plugin(name: str) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(name=name))


@pytest.mark.filterwarnings("ignore")  # Megatron's own, where it is imported
def test_a_plugin_that_changes_nothing_in_this_run_is_warned_of() -> None:
    from ascend_run.core.run import RunRequest, log_plugins

    request = RunRequest(
        config=None,  # type: ignore[arg-type]  # the log does not read it
        config_toml="",
        plugins=[plugin("inner"), plugin("outer")],
        idle={"outer": "parallel.context_parallel_size <= 1"},
        plan_json="{}",
        lock={},
    )
    with capture_logs() as events:
        log_plugins(request, structlog.get_logger())

    assert [(e["log_level"], e["event"], e["plugin"]) for e in events] == [
        ("info", "plugin.enabled", "inner"),
        ("info", "plugin.enabled", "outer"),
        ("warning", "plugin.idle", "outer"),
    ]
    assert events[-1]["changes_nothing_as"] == "parallel.context_parallel_size <= 1"
