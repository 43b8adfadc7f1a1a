"""The folder of plugins that may keep files in place of memory of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

PLUGINS = [
    pytest.param(name, marks=pytest.mark.needs_plugins(name))
    for name in ("swap-attention", "swap-optimizer", "virtual-optimizer")
]


def plan(plugin: str, folder: Path | str, **more: Any) -> None:
    planned({**DENSE, f"plugins.{plugin}.folder": str(folder), **more}, (plugin,))


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", ["", "missing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, plugin: str, name: str) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / name) if name else ""
    plan(plugin, tmp_path)
    with pytest.raises(ConfigError) as caught:
        plan(plugin, folder)
    named = f"{plugin}: plugins.{plugin}.folder={folder}"
    assert f"{named} is not an existing folder; create it, or name another" in str(caught.value)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_folder_that_takes_no_file_is_refused(plugin: str) -> None:
    """Whatever its permissions are: even root creates no file there."""
    with pytest.raises(ConfigError) as caught:
        plan(plugin, "/proc")
    assert f"{plugin}: plugins.{plugin}.folder=/proc: no file can be created" in str(caught.value)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_files_are_for_the_cpu(tmp_path: Path, plugin: str) -> None:
    with pytest.raises(ConfigError, match="is for platform cpu, not cuda; leave it out"):
        plan(plugin, tmp_path, platform="cuda")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_planning_leaves_nothing_in_the_folder(tmp_path: Path, plugin: str) -> None:
    plan(plugin, tmp_path)
    assert not any(tmp_path.iterdir())
