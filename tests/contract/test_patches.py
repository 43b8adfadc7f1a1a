"""Other people's functions that we replace are counted: a patch is the last resort."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ascend_run.plugin_api import absent_packages
from ascend_run.plugin_api.contracts import Patch
from ascend_run.registry.discovery import discover
from ascend_run.registry.hooks import implementations

AT_MOST = 10
PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def patches_of_ours() -> dict[str, Patch]:
    """By target, of every plugin of ours; one that several bring is one."""
    catalogue = discover()
    ours = catalogue.load(name for name, found in catalogue.items() if found.first_party)
    patching = [plugin for plugin in ours.values() if "ascend_patches" in implementations(plugin)]
    assert patching
    return {patch.target: patch for plugin in patching for patch in plugin().ascend_patches()}


def test_patches_of_megatron_are_few_and_each_has_its_reason_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(absent_packages.importlib.util, "find_spec", lambda name: None)
    patches = patches_of_ours()

    assert all(target.startswith("megatron.core.") for target in patches)
    assert 0 < len(patches) <= AT_MOST
    assert all(patch.why and patch.until and patch.versions for patch in patches.values())
    (count,) = re.findall(r"(\d+) patches of Megatron", PAGE.read_text())
    assert int(count) == len(patches), "docs/architecture.md says how many there are"
