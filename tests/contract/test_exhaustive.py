"""Of a test marked ``exhaustive`` the suite runs a covering sample, and the campaign the rest."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.campaigns.campaign import PASSED, fingerprint, read_result, result_path
from benchmarks.campaigns.suite_runs import collected, marked_files
from tests.support.exhaustive import LEFT_OUT, covering

ROOT = Path(__file__).parent.parent.parent
PLUGINS = read_result("suite")["figures"]["plugins"] if result_path("suite").exists() else ()
"""Without one of them there are fewer cases than the campaign had."""
TESTS = """
import pytest

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("size", [1, 2])
def test_of_a_product(letter, size): ...


@pytest.mark.exhaustive(by=lambda pair: pair)
@pytest.mark.parametrize("pair", ["ab", "bc", "cd", "da"])
def test_of_aspects(pair): ...


@pytest.mark.exhaustive(by=lambda number: ())
@pytest.mark.parametrize("number", [1, 2, 3])
def test_of_cases_that_show_nothing(number): ...


def test_without_parameters(): ...
"""


def ids_of(folder: Path, *words: str) -> list[str]:
    """Return the tests that a session with these words would run."""
    plugin = ("-p", "tests.support.exhaustive", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugin, *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_no_mark_leaves_a_test_without_a_case_and_nothing_is_lost(tmp_path: Path) -> None:
    """Even a mark on the whole module, and aspects that are empty."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive: see tests.support\n")
    (tmp_path / "test_cases.py").write_text(TESTS)
    drawn, rest = ids_of(tmp_path), ids_of(tmp_path, "--cases=rest")

    every = ids_of(tmp_path, "--cases=all")
    assert sorted(every) == sorted([*drawn, *rest])
    assert len({*every}) == 14
    product = [name for name in drawn if name.startswith("test_of_a_product")]
    assert len(product) == 3
    assert {value for name in product for value in name[18:-1].split("-")} == {*"12abc"}
    aspects = [name[16:18] for name in drawn if name.startswith("test_of_aspects")]
    assert (len(aspects), {*"".join(aspects)}) == (2, {*"abcd"})
    assert len([name for name in drawn if name.startswith("test_of_cases")]) == 1
    assert "test_without_parameters" in drawn
    one = next(name for name in rest if name.startswith("test_of_a_product"))
    assert one in ids_of(tmp_path, f"test_cases.py::{one}", "test_cases.py::test_of_aspects")
    assert len(ids_of(tmp_path, "-k", "product")) == 6
    (tmp_path / "ids.json").write_text(json.dumps([f"test_cases.py::{one}"]))
    assert ids_of(tmp_path, "--cases=ids.json") == [one]
    with pytest.raises(AssertionError, match="--cases=al: expected sample, all, rest, or a JSON"):
        ids_of(tmp_path, "--cases=al")


def test_every_aspect_is_drawn_and_a_new_case_moves_no_other() -> None:
    shown = {f"{a}{b}": [("a", a), ("b", b)] for a in range(9) for b in range(5)}
    drawn = covering(shown)

    every = {*itertools.chain(*shown.values())}
    assert {aspect for name in drawn for aspect in shown[name]} == every
    assert len(drawn) == 9
    assert covering(dict(reversed(shown.items()))) == drawn
    assert covering({"x": [], "y": []}) in (["x"], ["y"])
    assert covering({"x": [1], "y": [1, 2], "z": []}) == ["y"]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> Mapping[str, Sequence[str]]:
    """Return the ids of the marked files' tests; those of this session, if it has these files."""
    session = {
        "kept": [item.nodeid for item in request.session.items],
        "left": request.config.stash.get(LEFT_OUT, []),
    }
    files = {name.partition("::")[0] for names in session.values() for name in names}
    return session if files >= {*marked_files()} else collected()


@pytest.mark.needs_plugins(*PLUGINS)
def test_the_campaign_ran_every_case_that_the_suite_leaves_out(
    cases: Mapping[str, Sequence[str]],
) -> None:
    result = read_result("suite")
    left = sorted(cases["left"])

    assert len(left) > 0
    assert fingerprint(left) == result["fingerprint"], "run: make campaign NAME=suite"
    assert result["counts"] == {PASSED: len(left)}


def test_every_test_keeps_a_case(cases: Mapping[str, Sequence[str]]) -> None:
    kept = {name.partition("[")[0] for name in cases["kept"]}
    assert {name.partition("[")[0] for name in cases["left"]} <= kept


@pytest.mark.needs_plugins(*PLUGINS)
def test_every_file_keeps_a_case(cases: Mapping[str, Sequence[str]]) -> None:
    assert {name.partition("::")[0] for name in cases["kept"]} >= {*marked_files()}
