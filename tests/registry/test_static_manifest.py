"""A static manifest is read without importing the plugin, and checked against its Manifest."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import PluginLoadError
from ascend_run.registry.discovery import discover
from ascend_run.registry.static_manifest import LARGEST_BYTES, StaticManifest, static_manifest
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer, offer_declared

CANARY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
DECLARED = "summary = 'a plugin named ring'\nrequires_api = '>=0,<2'\nlevel = 1"
REQUIRED = "summary = 'x'\nrequires_api = '>=0'"
FIELDS = "requires_api='>=0,<2', level=1"
RING = StaticManifest(summary="a plugin named ring", requires_api=">=0,<2", level=1)


def ran(folder: Path) -> bool:
    return (folder / "fake_ring/ran").exists()


def problem_of(name: str) -> str:
    with pytest.raises(PluginLoadError) as refused:
        discover().load([name])
    (problem,) = refused.value.problems
    return problem


def test_it_is_read_without_importing_the_package(install: Install) -> None:
    folder = offer_declared(install, "ring", DECLARED, CANARY + plugin_source("ring", FIELDS))
    assert static_manifest(discover()["ring"]) == (RING, "")
    assert not ran(folder)
    discover().load(["ring"])
    assert ran(folder)


def test_a_distribution_without_one_is_loaded(install: Install) -> None:
    offer(install, "ring")
    assert static_manifest(discover()["ring"]) == (None, "")
    assert discover().load(["ring"])


def test_one_file_declares_several_plugins_in_a_subpackage(install: Install) -> None:
    points = {
        "ascend_run.plugins": {name: f"fake_rings.{name}:Plugin" for name in ("one", "two")},
        "ascend_run.manifests": dict.fromkeys(("one", "two"), "fake_rings.data:rings.toml"),
    }
    tables = "[one]\nsummary='1'\nrequires_api='==0'\n[two]\nsummary='2'\nrequires_api='>=0'"
    files = {"fake_rings/__init__.py": "raise AssertionError", "fake_rings/data/rings.toml": tables}
    install("rings", points, files)
    found = discover()
    assert static_manifest(found["one"]) == (
        StaticManifest(summary="1", requires_api="==0", level=2),
        "",
    )
    assert static_manifest(found["two"]) == (
        StaticManifest(summary="2", requires_api=">=0", level=2),
        "",
    )


def test_it_is_found_in_an_editable_install(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose packages a finder maps to the source tree, as setuptools' does."""
    offer_declared(install, "ring", DECLARED).joinpath("fake_ring").rename(tmp_path / "fake_ring")

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            source = tmp_path / name / "__init__.py"
            return spec_from_file_location(name, source) if source.is_file() else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert static_manifest(discover()["ring"]) == (RING, "")


def test_an_api_that_it_excludes_is_refused_before_the_import(install: Install) -> None:
    declared = "summary = 'x'\nrequires_api = '>=1,<3'\nfield_of_api_1 = 'y'"
    folder = offer_declared(install, "ring", declared, CANARY)
    assert problem_of("ring") == (
        "'ring' of ascend-run-ring 1.0 requires plugin API >=1,<3 and this is API 0; install a "
        "release of ascend-run-ring for it, or one of ascend-run with that API"
    )
    assert not ran(folder)


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ("requires_api='>=0,<2', level=2", "level is 1 and 2"),
        ("requires_api='>=0', level=1", 'requires_api is ">=0,<2" and ">=0"'),
        (f"{FIELDS}, claims=(Claim.NORM,)", 'claims is [] and ["norm"]'),
        (f"{FIELDS}, platforms={{}}", 'platforms is {"cpu": "real"} and {}'),
    ],
)
def test_values_that_differ_from_the_manifest_are_refused(
    install: Install, fields: str, difference: str
) -> None:
    declared = f"{DECLARED}\nclaims = []\nplatforms.cpu = 'real'"
    offer_declared(install, "ring", declared, plugin_source("ring", fields))
    assert problem_of("ring") == (
        "'ring' of ascend-run-ring 1.0 has a static manifest, fake_ring:manifest.toml, that "
        f"differs from its Manifest: {difference}; make them equal"
    )


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (
            "summary = 'x'\nrequires_api = '>=0'\nlevel = 9",
            "level in [ring] is 9; expected one of 0, 1, 2",
        ),
        ("summary = 'x'\nrequires_api = '0'", "requires_api '0' is not a range of API versions"),
        ("summary = 7\nrequires_api = '>=0'", "summary in [ring] is 7; expected a text"),
        ("summary = 'x'", "requires_api in [ring] is None; expected a text"),
        ("sumary = 'x'", "unknown: sumary; its fields are summary, requires_api, level"),
        (f"{REQUIRED}\nlevel = true", "level in [ring] is True; expected one of 0, 1, 2"),
        (f"{REQUIRED}\nnumerics = 'exact'", "is 'exact'; expected one of bitwise, rounding, model"),
        (f"{REQUIRED}\nmaturity = 1", "is 1; expected one of stable, beta, experimental"),
        (f"{REQUIRED}\nclaims = 'norm'", "is 'norm'; expected a list, each item one of attention-"),
        (f"{REQUIRED}\nclaims = ['x']", "is ['x']; expected a list, each item one of attention-"),
        (f"{REQUIRED}\nplatforms = {{cpu = 1}}", "is {'cpu': 1}; expected a table, each value one"),
        (f"{REQUIRED}\nplatforms = 'cpu'", "is 'cpu'; expected a table, each value one of real,"),
        ("this is no TOML", "Expected '=' after a key"),
        (f"summary = '{'x' * LARGEST_BYTES}'", f"it has more than {LARGEST_BYTES} bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_an_invalid_file_is_refused_before_the_import(
    install: Install, declared: str, reason: str
) -> None:
    folder = offer_declared(install, "ring", declared, CANARY)
    invalid = "has a static manifest, fake_ring:manifest.toml, that is invalid: "
    assert invalid in (problem := problem_of("ring"))
    assert reason in problem
    assert not ran(folder)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("fake_ring:lost.toml", "there is no such file; is it in the wheel, as package data?"),
        ("nowhere_at_all:manifest.toml", "there is no such file"),
        ("not a value!", "there is no such file"),
        ("fake_ring:other.toml", "it has no table [ring]"),
        ("fake_ring:latin.toml", "'utf-8' codec can't decode"),
    ],
)
def test_an_entry_point_to_no_manifest_is_refused(
    install: Install, value: str, reason: str
) -> None:
    points = {
        "ascend_run.plugins": {"ring": "fake_ring:Plugin"},
        "ascend_run.manifests": {"ring": value},
    }
    files = {"fake_ring/__init__.py": CANARY, "fake_ring/other.toml": "[circle]"}
    folder = install("ascend-run-ring", points, files)
    (folder / "fake_ring/latin.toml").write_bytes("[ring]\nsummary='\u00e9'".encode("latin-1"))
    assert reason in problem_of("ring")
    assert not ran(folder)
