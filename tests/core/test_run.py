"""What a run says before it begins, and what it leaves if it cannot begin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from ascend_run.plugin_api import CheckpointError
from tests.support.probed_runs import train


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


def test_a_run_that_cannot_resume_leaves_the_files_of_the_one_before(tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        names = ("config.toml", "environment.json", "plan.json", "plugins.lock.json")
        return {name: (tmp_path / "run" / name).read_bytes() for name in names}

    train(tmp_path, values={"checkpoint.save_interval": 1})
    before = files()
    with pytest.raises(CheckpointError):
        train(tmp_path, values={"checkpoint.save_interval": 1, "model.ffn_hidden_size": 64})
    assert files() == before
    train(tmp_path, values={"checkpoint.save_interval": 1, "train.train_iters": 2})
    assert files()["config.toml"] != before["config.toml"]
