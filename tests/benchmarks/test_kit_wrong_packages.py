"""Wrong packages: each mistake applies to its right package, and a sample is stopped again."""

from __future__ import annotations

import ast

import pytest

from ascend_run.testing.conformance import CHECKS
from ascend_run.testing.pool import GlooPool
from benchmarks.campaigns import kit_wrong_packages
from benchmarks.campaigns.campaign import PASSED, is_full, read_result
from benchmarks.campaigns.kit_wrong_packages import MISTAKES, found_in, verdict_on
from benchmarks.campaigns.wrong_packages.mistake import Change, Mistake
from benchmarks.campaigns.wrong_packages.package import right_packages

RIGHT = right_packages()
SAMPLED = ("input-changed-in-place", "misspelt-argument")
"""One that takes a run, and one that does not."""


def test_there_are_twenty_mistakes_in_packages_of_each_kind() -> None:
    assert len(MISTAKES) >= 20
    assert {RIGHT[mistake.package].names.kind for mistake in MISTAKES.values()} == {
        "feature",
        "task",
        "family",
        "platform",
    }


def test_the_committed_result_is_full_and_passes() -> None:
    campaign = kit_wrong_packages.CAMPAIGN
    result = read_result(campaign.name)
    assert is_full(campaign, result)
    assert campaign.passes(result["figures"], result["counts"])
    assert result["passes"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_applies_to_its_right_package(name: str) -> None:
    mistake = MISTAKES[name]
    wrong, right = mistake.applied_to(RIGHT), RIGHT[mistake.package]

    assert wrong.files != right.files
    for file, text in wrong.files.items():
        if file.endswith(".py"):
            ast.parse(text)
    assert {*mistake.checks} <= {check.code for check in CHECKS}


def test_a_package_that_has_changed_is_reported() -> None:
    mistake = Mistake(
        name="any",
        what="",
        package="score-cap",
        changes=(Change("no such text", ""),),
        checks=(),
        says="",
    )
    with pytest.raises(LookupError, match=r"'no such text' stands in __init__\.py 0 times"):
        mistake.applied_to(RIGHT)


@pytest.mark.parametrize("name", SAMPLED)
def test_wrong_packages_are_stopped_again(
    gloo_pool: GlooPool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kit_wrong_packages, "pool", lambda: gloo_pool)
    mistake = MISTAKES[name]

    found = found_in(mistake.applied_to(RIGHT), name, mistake.checks)
    assert verdict_on(mistake, found) == PASSED


def test_a_package_is_stopped_by_the_expected_message() -> None:
    mistake = MISTAKES["bitwise-but-rounds"]
    assert verdict_on(mistake, {}) == "not stopped"
    assert verdict_on(mistake, {"KIT-PARITY": ["dense, bitwise: decoder"]}) == PASSED
    for found in ({"KIT-PARITY": ["it raises"]}, {"KIT-AGAIN": ["dense, bitwise: decoder"]}):
        assert verdict_on(mistake, found) == "stopped for another reason"


def test_an_accused_right_package_fails_the_campaign() -> None:
    right = {"right: a": {"verdict": PASSED}}
    wrong = {
        str(i): {"verdict": PASSED, "expected": ["KIT-UNDO"], "problems": {"KIT-UNDO": "any"}}
        for i in range(20)
    }
    figures = kit_wrong_packages.figures({**right, **wrong})
    assert kit_wrong_packages.passes(figures, {})
    assert figures["checks that stopped one"] == ["KIT-UNDO"]
    missed = {**wrong, "0": {"verdict": "not stopped"}}
    assert kit_wrong_packages.passes(kit_wrong_packages.figures({**right, **missed}), {})
    missed["1"] = {"verdict": "not stopped"}
    assert not kit_wrong_packages.passes(kit_wrong_packages.figures({**right, **missed}), {})
    accused = {"right: a": {"verdict": "accused"}, **wrong}
    assert not kit_wrong_packages.passes(kit_wrong_packages.figures(accused), {})
