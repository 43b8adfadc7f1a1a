"""A case that needs a plugin is there where the plugin is, and nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_run.registry.discovery import discover
from benchmarks.campaigns.removal import FEATURES
from tests.support.needed_plugins import MARKER, NAMED, case, names_of

ROOT = Path(__file__).parent.parent.parent
TESTS = """
import pytest

from tests.support.needed_plugins import case, names_of


@pytest.mark.needs_plugins("cpu")
def test_beside_a_plugin_that_is_there(): ...


@pytest.mark.needs_plugins("cpu", "never-written")
def test_beside_one_that_is_not(): assert False


@pytest.mark.parametrize(
    "number", [1, pytest.param(2, marks=pytest.mark.needs_plugins("never-written"))]
)
def test_of_a_parameter(number): assert number == 1


@pytest.mark.parametrize(("plugins", "size"), [case((), 1), case(("cpu", "never-written"), 2)])
def test_of_a_list(plugins, size): assert size == 1


@pytest.mark.parametrize("name", names_of({"a": ["cpu"], "b": ["never-written"]}, tuple))
def test_of_a_table(name): assert name == "a"
"""


def test_what_needs_a_missing_plugin_is_deselected_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(TESTS)
    words = ("-p", "tests.support.needed_plugins", "--config-file", str(ROOT / "pyproject.toml"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"= 4 passed, 4 deselected in", done.stdout), done.stdout
    passed = re.findall(r"::(\S+) PASSED", done.stdout)
    assert passed == [
        "test_beside_a_plugin_that_is_there",
        "test_of_a_parameter[1]",
        "test_of_a_list[plugins0-1]",
        "test_of_a_table[a]",
    ]


def test_a_table_s_cases_need_what_they_name() -> None:
    one, other = names_of({"one": ("cpu", "gpt2"), "other": ()}, tuple)

    assert (one.values, one.id) == (("one",), "one")
    assert [(mark.name, mark.args) for mark in one.marks] == [(MARKER, ("cpu", "gpt2"))]
    assert [mark.args for mark in other.marks] == [()]
    assert case(("cpu",), 2, id="two").values == (("cpu",), 2)


def test_every_plugin_that_a_test_needs_is_one_of_ours(request: pytest.FixtureRequest) -> None:
    """A name that is misspelt would take its case out for ever."""
    assert request.config.stash[NAMED] <= {*discover(), *FEATURES}
