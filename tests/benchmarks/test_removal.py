"""Without a feature: what the campaign deletes, which tests it runs, and what it makes of them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from benchmarks.campaigns import removal
from benchmarks.campaigns.campaign import is_full, read_result
from benchmarks.campaigns.removal import CAMPAIGN, noticing, outcome, remove, summary

SETUP = """
ascend_run.plugins =
    gloo-free-save = ascend_run.plugins.checkpoint.gloo_offload:GlooOffload
    gloo-offload = ascend_run.plugins.checkpoint.gloo_offload:GlooOffload
    gmm = ascend_run.plugins.experts.gmm:Gmm
"""
TESTS = {
    "contract/test_any.py": "",
    "core/test_speaks_of_it.py": "enable = ['gloo-offload']",
    "core/test_asks.py": "from ascend_run.registry.discovery import discover\nOURS = discover()",
    "core/test_other.py": "import torch",
    "core/helper.py": "from ascend_run.plugins.checkpoint.gloo_offload import GlooOffload",
    "core/test_beside_the_helper.py": "from .helper import one",
    "ops/test_by_its_whole_name.py": "from tests.core.helper import one",
    "ops/test_another_helper.py": "from .helper import one",
    "plugins/checkpoint/gloo_offload/test_itself.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {f"tests/{name}": text for name, text in TESTS.items()} | {
        "setup.cfg": SETUP,
        "docs/plugins/checkpoint/gloo-offload.md": "",
        "docs/plugins/experts/gmm.md": "see [it](gloo-offload.md#why) or [that](more/gmm.md): "
        "`plugins.gloo-offload.slice_elements=9`, `plugins.gmm.backend`",
        "ascend_run/plugins/checkpoint/gloo_offload/__init__.py": "",
        "ascend_run/plugins/experts/gmm/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_everything_of_a_feature_is_deleted_and_nothing_else(tree: Path) -> None:
    before = {path for path in tree.rglob("*") if path.is_file()}
    remove(tree, "gloo-offload")

    gone = {str(path.relative_to(tree)) for path in before if not path.exists()}
    assert gone == {
        "docs/plugins/checkpoint/gloo-offload.md",
        "ascend_run/plugins/checkpoint/gloo_offload/__init__.py",
        "tests/plugins/checkpoint/gloo_offload/test_itself.py",
    }
    assert (tree / "docs/plugins/experts/gmm.md").read_text() == (
        "see it or [that](more/gmm.md): plugins.gloo-offload.slice_elements=9, "
        "`plugins.gmm.backend`"
    )
    assert (tree / "setup.cfg").read_text() == "".join(
        line for line in SETUP.splitlines(keepends=True) if "gloo" not in line
    )


def test_tests_run_that_could_notice(tree: Path) -> None:
    remove(tree, "gloo-offload")

    assert noticing(tree, "gloo-offload") == [
        "tests/contract/test_any.py",
        "tests/core/test_asks.py",
        "tests/core/test_beside_the_helper.py",
        "tests/core/test_speaks_of_it.py",
        "tests/ops/test_by_its_whole_name.py",
    ]
    assert noticing(tree, "gmm") == ["tests/contract/test_any.py", "tests/core/test_asks.py"]


LOG = """..F.E
FAILED tests/core/test_one.py::test_a[cp=2 - x] - AssertionError: assert 1 - 2 == 3
FAILED tests/core/test_one.py::test_b
ERROR tests/core/test_two.py::test_c - ValueError
=== 2 failed, 40 passed, 3 deselected, 1 error in 12.34s (0:00:12) ===
"""


def test_pytest_s_last_words_are_understood() -> None:
    counts, failing = summary(LOG)

    assert counts == {"passed": 40, "failed": 2, "error": 1, "deselected": 3}
    assert failing == [
        "tests/core/test_one.py::test_a[cp=2 - x]",
        "tests/core/test_one.py::test_b",
        "tests/core/test_two.py::test_c",
    ]
    assert summary("") == ({}, [])


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([({"passed": 3}, [])], "passed"),
        ([({"passed": 3, "failed": 1}, ["t"]), ({"passed": 1}, [])], "passed"),
        ([({"passed": 3, "failed": 1}, ["t"]), ({"failed": 1}, ["t"])], "fails"),
        ([({}, [])], "fails"),
    ],
    ids=["all", "at-the-second-try", "twice", "nothing-ran"],
)
def test_what_fails_twice_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: list[object], verdict: str
) -> None:
    left = iter(results)
    monkeypatch.setattr(removal, "pytest", lambda *given: next(left))
    found = outcome(tmp_path, ["t"], tmp_path / "log")

    assert found["verdict"] == verdict
    assert found.get("failing", ["t"]) in (["t"], [])
    assert [*left] == []


def test_of_any_two_features_one_set_lacks_only_the_first() -> None:
    sets = [set(case.split("+")) for case in CAMPAIGN.cases(CAMPAIGN.seed)]
    for first, second in permutations(removal.FEATURES, 2):
        assert any(first in lacking and second not in lacking for lacking in sets)


def test_the_whole_campaign_was_run_and_what_was_left_passed() -> None:
    result = read_result(CAMPAIGN.name)

    assert is_full(CAMPAIGN, result)
    assert result["passes"]
    for features, found in result["figures"]["without"].items():
        assert found["passed"] > 1000, features
        assert found["verdict"] == "passed", features
