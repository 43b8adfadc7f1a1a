"""What every plugin of ours keeps to; a new one is held to it by its line in setup.cfg alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from ascend_run.entrypoints.option_docs import option_docs
from ascend_run.plugin_api import API_VERSION, Numerics
from ascend_run.registry.discovery import Candidate, discover
from ascend_run.registry.explanation import check_hooks
from ascend_run.registry.hooks import implementations
from ascend_run.registry.kinds import Plugin

ROOT = Path(__file__).parent.parent.parent
CATALOGUE = discover()
OURS = [name for name, candidate in CATALOGUE.items() if candidate.first_party]

pytestmark = pytest.mark.parametrize("name", OURS)

_IMPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def candidate(name: str) -> Candidate:
    return CATALOGUE[name]


def plugin(name: str) -> Plugin:
    return CATALOGUE.load([name])[name]


def source_of(name: str) -> ast.Module:
    """The module that declares a plugin, unread by Python."""
    path = ROOT / f"{candidate(name).entry_point.module.replace('.', '/')}/__init__.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def manifest_arguments(name: str) -> set[str]:
    """The arguments that a plugin's Manifest is written with."""
    for node in ast.walk(source_of(name)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Manifest"):
            return {keyword.arg or "" for keyword in node.keywords}
    raise AssertionError(f"{name}: no Manifest in its module")


def test_its_entry_point_has_a_name_of_its_manifest(name: str) -> None:
    manifest = plugin(name).manifest

    assert name in (manifest.name, *manifest.aliases)


def test_each_of_its_names_has_an_entry_point_to_the_same_class(name: str) -> None:
    manifest = plugin(name).manifest

    for other in (manifest.name, *manifest.aliases):
        assert candidate(other).value == candidate(name).value


def test_it_is_a_folder_of_its_name(name: str) -> None:
    folder = plugin(name).manifest.name.replace("-", "_")

    assert candidate(name).entry_point.module == f"ascend_run.plugins.{folder}"


def test_it_is_written_for_this_api(name: str) -> None:
    assert plugin(name).manifest.api_version == API_VERSION


def test_its_defaults_build(name: str) -> None:
    options = getattr(plugin(name), "config_class", None)

    instance = plugin(name)() if options is None else plugin(name)(options())

    assert isinstance(instance, plugin(name))


def test_its_options_are_frozen_and_documented(name: str) -> None:
    options = getattr(plugin(name), "config_class", None)
    if options is None:
        return  # it has none, and nothing to document

    assert options.__setattr__ is not object.__setattr__, "use attrs.frozen"
    assert attrs.has(options)
    assert [doc.name for doc in option_docs(options) if not doc.help] == []


def test_its_hooks_exist_and_take_what_there_is(name: str) -> None:
    assert implementations(plugin(name))
    check_hooks([plugin(name)])


def test_what_its_attention_can_do_is_known_when_a_run_is_planned(name: str) -> None:
    hooks = {"ascend_attention_kernel", "ascend_attention"}

    if hooks & implementations(plugin(name)).keys():
        assert plugin(name).manifest.attention is not None


def test_importing_it_imports_no_torch(name: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT, candidate(name).entry_point.module],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert process.returncode == 0, process.stderr
    heavy = {"torch", "megatron", "transformers", "numpy", "tensorboard"}
    assert not heavy & {*json.loads(process.stdout)}


def test_it_says_what_it_changes_in_the_numbers_and_where_it_runs(name: str) -> None:
    written = manifest_arguments(name)

    assert {"numerics", "platforms"} <= written, "write them out, though they have defaults"
    assert isinstance(plugin(name).manifest.numerics, Numerics)


def test_its_summary_is_one_short_line(name: str) -> None:
    summary = plugin(name).manifest.summary

    assert summary == summary.strip()
    assert 0 < len(summary) <= 90
    assert "\n" not in summary
    assert not summary.endswith(".")


def test_it_has_a_page(name: str) -> None:
    page = ROOT / f"docs/plugins/{plugin(name).manifest.name}.md"

    assert page.is_file()
    assert page.read_text(encoding="utf-8").startswith("# ")


def test_it_has_a_suite_of_its_own(name: str) -> None:
    folder = ROOT / f"tests/plugins/{plugin(name).manifest.name.replace('-', '_')}"

    assert [*folder.glob("test_*.py")]
