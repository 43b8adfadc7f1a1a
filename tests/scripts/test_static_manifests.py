"""The static manifests of the built-in plugins are generated from their manifests."""

from __future__ import annotations

import attrs
import pytest
from click.testing import CliRunner

from ascend_run.registry.discovery import discover
from ascend_run.registry.static_manifest import StaticManifest, static_manifest
from scripts.static_manifests import ROOT, SETUP, command, static_manifests

CATALOGUE = discover()
CLASSES = {name: found.entry_point.load() for name, found in CATALOGUE.items() if found.first_party}
CANONICAL = [name for name, plugin in CLASSES.items() if name == plugin.manifest.name]


def test_each_built_in_plugin_has_the_static_manifest_of_its_class() -> None:
    declared = {name: static_manifest(CATALOGUE[name]) for name in CANONICAL}
    assert declared == {name: (StaticManifest.of(CLASSES[name]), "") for name in CANONICAL}


def test_the_written_files_are_those_that_the_script_writes() -> None:
    assert CliRunner().invoke(command, ["--check"]).exit_code == 0


def test_a_changed_manifest_makes_its_file_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    name = CANONICAL[0]
    changed = attrs.evolve(CLASSES[name].manifest, summary="another summary")
    monkeypatch.setattr(CLASSES[name], "manifest", changed)

    checked = CliRunner().invoke(command, ["--check"])

    file = CATALOGUE[name].manifest_file.rpartition(":")[2]
    assert checked.exit_code == 1
    assert f"/{file} is out of date; run python -m scripts.static_manifests" in checked.output


def test_lines_are_written_into_their_group_only() -> None:
    setup = (ROOT / SETUP).read_text(encoding="utf-8")
    before, begin, rest = setup.partition("ascend_run.manifests =\n")
    emptied = before + begin + rest[rest.index("\n\n") :]

    assert static_manifests(emptied)[SETUP] == setup
