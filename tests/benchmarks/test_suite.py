"""The campaign that runs what the suite leaves out: one outcome a case, whatever a case does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.campaigns import suite, suite_runs
from benchmarks.campaigns.campaign import PASSED
from benchmarks.campaigns.reach_of_test import plugins_of, reach_of_test, start_of
from benchmarks.campaigns.suite_runs import collected, marked_files, outcomes

TESTS = """
import os
import pytest
from pathlib import Path

ENDED = Path(__file__).with_name("ended")


@pytest.fixture
def broken():
    yield
    raise ValueError("in teardown")


@pytest.mark.exhaustive(by=lambda what: ())
@pytest.mark.parametrize("what", ["well", "badly", "at first", "death", "skip", "unlisted"])
def test_ends(what, request):
    first = not (ENDED / what).exists()
    (ENDED / what).mkdir(parents=True, exist_ok=True)
    if what == "badly":
        request.getfixturevalue("broken")
    if what == "death" or (what == "at first" and first):
        os._exit(7) if what == "death" else pytest.fail("busy")
    if what == "skip":
        pytest.skip("no device")
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one file of tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_ends.py").write_text(TESTS)
    (tmp_path / "tests/test_plain.py").write_text("def test_plain(): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive: see tests.support\n")
    monkeypatch.setenv("PYTHONPATH", str(suite_runs.ROOT))
    monkeypatch.setattr(suite_runs, "WORDS", (*suite_runs.WORDS, "-p", "tests.support.exhaustive"))
    return tmp_path


def test_each_case_has_one_outcome_even_if_its_process_dies(tree: Path) -> None:
    assert marked_files(tree) == ["tests/test_ends.py"]
    found = collected(tree)
    assert (len(found["kept"]), len(found["left"])) == (1, 5)
    names = ("well", "badly", "at first", "death", "skip", "gone")
    ids = {name: f"tests/test_ends.py::test_ends[{name}]" for name in names}
    ended = list(outcomes([*ids.values()], 2, tree))

    assert sorted(case for case, _ in ended) == sorted(ids.values())
    by_id = dict(ended)
    assert by_id[ids["well"]] == {"verdict": PASSED}
    assert by_id[ids["at first"]] == {"verdict": PASSED, "attempts": 2}
    verdicts = {name: by_id[ids[name]]["verdict"] for name in names}
    assert verdicts["badly"] == "failed"
    assert "ValueError: in teardown" in by_id[ids["badly"]]["why"]
    assert verdicts["skip"] == "skipped"
    assert verdicts["death"] == verdicts["gone"] == "error"
    assert "pytest ended with exit code 7" in by_id[ids["death"]]["why"]
    figures = suite.figures(by_id)
    assert figures["tests"] == {"tests/test_ends.py::test_ends": 6}
    assert figures["passed at the second attempt"] == [ids["at first"]]
    assert {"mixtral", "llama", "cpu", "sft"} <= {*figures["plugins"]}


@pytest.mark.needs_plugins("gmm", "lora", "ulysses")
def test_a_case_reaches_its_file_its_fixtures_and_the_plugins_it_names() -> None:
    kernel = "tests/plugins/sequence/ulysses/test_kernel.py"
    assert start_of(suite_runs.ROOT, kernel)[0] == kernel
    assert "tests/conftest.py" in start_of(suite_runs.ROOT, kernel)
    assert plugins_of(kernel, "test_x[odd-batch]") >= {"ulysses", "cpu", "pretrain"}
    assert "gmm" not in plugins_of(kernel, "test_x[odd-batch]")
    kit = "tests/contract/test_plugins.py"
    one, other = (f"{kit}::test_it_passes_the_kit[{name}-KIT-UNDO]" for name in ("gmm", "lora"))
    assert plugins_of(*one.split("::")) == {"gmm", "cpu", "pretrain"}
    assert len(plugins_of(kit, "test_it_passes_the_kit[]")) > 50
    assert reach_of_test(one) == reach_of_test(one.replace("UNDO", "PARITY"))
    assert reach_of_test(one) != reach_of_test(other)
