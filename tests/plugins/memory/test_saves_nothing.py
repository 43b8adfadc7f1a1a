"""Plugins that move tensors to the host say so where that saves no memory."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import pytest
from structlog.testing import capture_logs

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.plan.cost_pictures import cost_section
from ascend_run.tools.plan.cost_text import cost_lines
from ascend_run.tools.plan.costs import cost_data
from tests.support.costs import planned
from tests.support.small_runs import training

SMALL: Final = {
    "plugins.smart-swap.min_bytes": 1,
    "plugins.swap-attention.min_bytes": 1,
}
NAMES: Final = ("smart-swap", "swap-attention", "swap-optimizer", "virtual-optimizer")
PLUGINS: Final = [pytest.param(name, marks=pytest.mark.needs_plugins(name)) for name in NAMES]
IN_FILES: Final = PLUGINS[1:]


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


def settings(plugin: str, **options: str) -> dict[str, Any]:
    small = {key: value for key, value in SMALL.items() if key.startswith(f"plugins.{plugin}.")}
    given = {f"plugins.{plugin}.{name}": value for name, value in options.items()}
    return {**DENSE, **small, **given}


def notes(values: Mapping[str, Any], plugin: str) -> list[str]:
    """Return what ``plan`` notes of a run, in its records, its text and its page."""
    prepared, _ = planned(values, (plugin,))
    cost = cost_data(prepared.config, prepared.layout, Hooks(prepared.instances()))
    shown = [line.strip() for line in cost_lines(cost) if "note: " in line]
    assert shown == [f"note: {note}" for note in cost.notes or ()]
    page = html.unescape(str(cost_section(cost)))
    assert page.count("<li>") == len(shown)
    assert all(f"<li>{note}</li>" in page for note in cost.notes or ())
    return [*(cost.notes or ())]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plan_notes_it_on_the_cpu_alone(plugin: str) -> None:
    (note,) = notes(settings(plugin), plugin)
    assert f"{plugin}: no memory is saved, since the host's is the device's on platform cpu" in note
    assert (f"; set plugins.{plugin}.folder to a folder on a disk" in note) is (
        plugin != "smart-swap"
    )
    assert notes({**settings(plugin), "platform": "cuda"}, plugin) == []


@pytest.mark.parametrize("plugin", IN_FILES)
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_plan_notes_a_file_system_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: str, kind: str
) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [Mount("/", kind)])
    found = notes(settings(plugin, folder=str(tmp_path)), plugin)
    files = f"the files of plugins.{plugin}.folder={tmp_path} are in memory (tmpfs)"
    warnings = [f"{plugin}: no memory is saved, since {files}; name a folder on a disk"]
    assert found == (warnings if kind == "tmpfs" else [])


def warned(values: Mapping[str, Any], plugins: Sequence[str]) -> list[tuple[str, str]]:
    """Return what plugins say before a run. A rank's job."""
    with capture_logs() as logs, training(values, plugins) as run:
        run.hooks.event("ascend_before_run")(context=run.context)
    return [
        (entry["log_level"], entry["why"])
        for entry in logs
        if entry["event"] == "plugin.saves_nothing" and entry["plugin"] in plugins
    ]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_run_warns_of_what_plan_notes(gloo_pool: GlooPool, plugin: str) -> None:
    (note,) = notes(settings(plugin), plugin)
    (found,) = gloo_pool.run(warned, 1, settings(plugin), (plugin,))
    assert found == [("warning", note.removeprefix(f"{plugin}: "))]
