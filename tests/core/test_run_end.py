"""However a run ends, every listener is called, and the error that ended it is raised."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascend_run.core.hook_errors import HookCall, hook_call_of
from ascend_run.core.log.metrics import read_metrics
from ascend_run.plugin_api import ForwardLink, OptimizerSpec, StorageError
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import probe, train

MODULE = "the module tests.support.fake_plugins"


def listener(name: str, told: list[Any]) -> Any:
    """A plugin that hears of the end."""
    return plugin(name, {"ascend_after_run": lambda self: told.append(name)})()


def failed_hooks(folder: Path) -> list[tuple[str, str, str, str]]:
    """Plugin, distribution, hook and error of the log's events."""
    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    return [
        (line["plugin"], line["distribution"], line["hook"], line["error"])
        for line in log
        if line["event"] == "hook.failed"
    ]


def failures(folder: Path) -> list[str]:
    """The errors in the metrics file."""
    events = read_metrics(folder / "run/metrics.jsonl").events
    return [event["error"] for event in events if event["event"] == "failure"]


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
    assert failed_hooks(tmp_path) == [
        ("failing-run", MODULE, "ascend_after_run", "ValueError: no end"),
        ("failing-step", MODULE, "ascend_after_step", "RuntimeError: planted"),
    ]
    assert failures(tmp_path) == [
        f"RuntimeError: planted; raised by 'failing-step' of {MODULE} in ascend_after_step"
    ]


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
    assert failed_hooks(tmp_path) == [
        ("failing-run", MODULE, "ascend_after_run", "ValueError: no end")
    ]


def fail(*args: Any) -> Any:
    raise RuntimeError("planted")


HOOKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "choices": ("ascend_machine_choices", fail),
    "wrapper": ("ascend_checkpoint_transfer", lambda self: fail),
    "link": ("ascend_layer", lambda self: lambda layer: ForwardLink(wrap=fail, compilable=True)),
    "builder": (
        "ascend_optimizer",
        lambda self: OptimizerSpec(build=fail, states={}, element_wise=True),
    ),
    "entry": (
        "ascend_checkpoint_entries",
        lambda self: {"own": SimpleNamespace(state_dict=fail, load_state_dict=fail)},
    ),
    "metrics": ("ascend_metrics", lambda self: {"own": fail}),
    "event": ("ascend_before_run", fail),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_an_exception_is_named_in_terminal_log_and_report(tmp_path: Path, kind: str) -> None:
    """Whenever it is raised; other listeners are called."""
    hook, function = HOOKS[kind]
    told: list[Any] = []
    probes = (probe(hook, function), listener("other", told))
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, *probes, values={"checkpoint.save_interval": 1})
    assert told == ([] if kind == "choices" else ["other"])

    line = f"raised by 'probe' of {MODULE} in {hook}"
    assert traceback.format_exception(raised.value)[-1] == f"{line}\n"
    assert failed_hooks(tmp_path) == [("probe", MODULE, hook, "RuntimeError: planted")]
    page = tmp_path / "report.html"
    write_report([read_run(tmp_path / "run")], page)
    (shown,) = re.findall('<p class="failure">(.*?)</p>', page.read_text())
    assert html.unescape(shown) == f"RuntimeError: planted; {line}"


@pytest.mark.parametrize("hook", ["ascend_device", "ascend_process_settings"])
def test_an_exception_before_there_is_a_log_is_named(tmp_path: Path, hook: str) -> None:
    function = fail if hook == "ascend_device" else lambda self: {"own": contextmanager(fail)()}
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, probe(hook, function))
    assert hook_call_of(raised.value) == HookCall(hook, "probe", MODULE)


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
