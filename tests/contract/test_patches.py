"""Other people's functions that we replace are counted: a patch is the last resort."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from ascend_run.plugin_api import Support
from ascend_run.plugin_api.contracts import Patch
from ascend_run.plugin_api.implementations import implementations
from ascend_run.plugins import platforms
from ascend_run.prepare.instances import options_of
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Plugin
from ascend_run.registry.pairs import exclusion
from tests.support.fake_plugins import platform, plugin

AT_MOST = 10
ROOT = Path(__file__).parents[2]
FACADE = "torch.cuda facade"


@pytest.fixture
def patching(monkeypatch: pytest.MonkeyPatch) -> dict[Plugin, tuple[Patch, ...]]:
    """Every built-in plugin that patches, with its patches."""
    catalogue = discover()
    ours = catalogue.load(name for name, found in catalogue.items() if found.first_party)
    # Packages that Megatron asks for are absent, so that all patches in their place are listed.
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: None)
    found = {
        plugin: tuple(_made(plugin).ascend_patches())
        for plugin in ours.values()
        if "ascend_patches" in implementations(plugin)
    }
    assert found
    return found


@pytest.fixture
def patches(patching: dict[Plugin, tuple[Patch, ...]]) -> dict[str, Patch]:
    """By target, of every built-in plugin; one that several bring is one."""
    return {patch.target: patch for each in patching.values() for patch in each}


def collisions(patching: Mapping[Plugin, Sequence[Patch]]) -> Iterator[str]:
    """Yield each target that is patched twice in some run, with the names of the plugins."""
    for first, second in combinations_with_replacement(patching, 2):
        targets = Counter(patch.target for patch in patching[first])
        if first is not second:
            if exclusion(first, second):  # they are in no run together
                continue
            targets = Counter({*targets}) + Counter({p.target for p in patching[second]})
        names = " and ".join(sorted({first.manifest.name, second.manifest.name}))
        yield from (f"{names}: {target}" for target, count in targets.items() if count > 1)


def _made(plugin: Plugin) -> Any:
    """An instance with the defaults of its options."""
    options = options_of(plugin)
    return plugin(options()) if options else plugin()


def test_no_target_is_patched_twice_in_a_run(
    patching: dict[Plugin, tuple[Patch, ...]],
) -> None:
    assert [*collisions(patching)] == []


def test_a_target_that_is_patched_twice_is_found(
    patching: dict[Plugin, tuple[Patch, ...]],
) -> None:
    (cpu,) = (one for one in patching if one.manifest.name == "cpu")
    patch, other = patching[cpu][:2]
    first, second = (plugin(name, platforms={"cpu": Support.REAL}) for name in ("first", "second"))
    assert [*collisions({cpu: (patch, other), platform("rival"): (patch,)})] == []
    assert [*collisions({first: (patch,), second: (other,)})] == []
    assert [*collisions({cpu: (patch, other, patch)})] == [f"cpu: {patch.target}"]
    assert [*collisions({cpu: (patch,), first: (patch,)})] == [f"cpu and first: {patch.target}"]


def test_each_patch_has_its_reason_and_its_end(patches: dict[str, Patch]) -> None:
    assert all(len(patch.why) > 5 and len(patch.until) > 5 for patch in patches.values())


def test_patches_of_megatron_are_few(patches: dict[str, Patch]) -> None:
    """The facade is counted apart; a new patch is a decision and changes the page."""
    others = [patch for patch in patches.values() if patch.group != FACADE]

    assert all(patch.target.startswith("megatron.core.") for patch in others)
    assert 0 < len(others) <= AT_MOST
    assert stated("docs/architecture.md", r"(\d+) patches of Megatron") == len(others)


def test_rows_of_the_facade_are_as_many_as_its_page_says(patches: dict[str, Patch]) -> None:
    page = "docs/plugins/platforms/cpu.md"
    facade = [patch for patch in patches.values() if patch.group == FACADE]

    assert stated(page, r"replaces (\d+) names") == len(facade)
    table = re.findall(r"^\| `\w+\.py` \| (\d+) \|", (ROOT / page).read_text(), re.MULTILINE)
    assert sum(map(int, table)) == len(facade)


def test_patches_accept_what_the_metadata_allows(patches: dict[str, Patch]) -> None:
    """And nothing else, so that no installed release is refused or goes unchecked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    distributions = {"megatron": "megatron-core", "torch": "torch"}

    for patch in patches.values():
        specifier = allowed[distributions[patch.package]]
        assert str(specifier) == ",".join(sorted(patch.versions.split(","))), patch.target


def stated(page: str, pattern: str) -> int:
    (count,) = re.findall(pattern, (ROOT / page).read_text())
    return int(count)
