"""However a run ends, every listener is called, and the error that ended it is raised."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.log.metrics import read_metrics
from ascend_run.plugin_api import StorageError
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import probe, train


def listener(name: str, told: list[Any]) -> Any:
    """A plugin that hears of the end."""
    return plugin(name, {"ascend_after_run": lambda self: told.append(name)})()


def failing(hook: str, error: Exception) -> Any:
    def fail(self: Any) -> None:
        raise error

    return probe(hook, fail, f"failing-{hook.rpartition('_')[2]}")


def test_a_listener_that_fails_hides_neither_the_error_nor_the_others(tmp_path: Path) -> None:
    told: list[Any] = []
    planted = RuntimeError("planted")
    with pytest.raises(RuntimeError) as raised:
        train(
            tmp_path,
            failing("ascend_after_run", ValueError("no end")),
            failing("ascend_after_step", planted),
            listener("second", told),
        )
    assert raised.value is planted
    assert told == ["second"]
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [
        (line["plugin"], line["hook"], line["error"])
        for line in log
        if line["event"] == "listener.failed"
    ] == [
        ("failing-run", "ascend_after_run", "ValueError: no end"),
    ]
    (failure,) = [
        event
        for event in read_metrics(tmp_path / "run/metrics.jsonl").events
        if event["event"] == "failure"
    ]
    assert failure["error"] == "RuntimeError: planted"


def test_a_failing_final_listener_fails_the_run_after_all_are_called(
    tmp_path: Path,
) -> None:
    told: list[Any] = []
    with pytest.raises(ValueError, match="no end"):
        train(
            tmp_path,
            failing("ascend_after_run", ValueError("no end")),
            listener("second", told),
        )
    assert told == ["second"]


@pytest.mark.parametrize(
    "hook", ["ascend_checkpoint_transfer", "ascend_layer", "ascend_before_run"]
)
def test_a_failure_before_the_first_step_is_reported(tmp_path: Path, hook: str) -> None:
    told: list[Any] = []
    planted = RuntimeError("planted")
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, failing(hook, planted), listener("other", told))
    assert raised.value is planted
    assert told == ["other"]


def test_a_full_disk_at_the_end_hides_neither_error_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the run still wants to write is refused."""
    told: list[Any] = []
    write = os.write

    def refuse(descriptor: int, data: Any) -> int:
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    def fill(self: Any) -> None:
        monkeypatch.setattr(os, "write", refuse)

    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        train(
            tmp_path,
            probe("ascend_after_step", fill, "filler"),
            failing("ascend_after_run", ValueError("cannot be logged either")),
            listener("other", told),
        )
    assert told == ["other"]
