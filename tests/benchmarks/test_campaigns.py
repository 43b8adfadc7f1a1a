"""The runner of campaigns: every case once, over any number of interruptions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.campaigns.campaign import Campaign, digest, find, is_full, names, sample
from benchmarks.campaigns.runner import run_campaign


class Counted:
    """A campaign of numbers, odd ones of which fail, that notes what it runs."""

    def __init__(self, count: int = 10, stops_at: str | None = None) -> None:
        self.count, self.stops_at = count, stops_at
        self.ran: list[str] = []

    def campaign(self) -> Campaign:
        return Campaign(
            name="counted", seed=4, cases=self.cases, run=self.run, figures=self.figures
        )

    def cases(self, seed: int) -> Sequence[str]:
        return [f"{seed}-{index}" for index in range(self.count)]

    def run(self, case: str) -> Mapping[str, Any]:
        if case == self.stops_at:
            raise KeyboardInterrupt
        self.ran.append(case)
        if case == "4-8":
            raise ValueError("eight")
        return {"verdict": "odd" if int(case[-1]) % 2 else "passed", "twice": 2 * int(case[-1])}

    def figures(self, outcomes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        return {"sum": sum(o.get("twice", 0) for o in outcomes.values())}


def run(counted: Counted, folder: Path, **options: Any) -> dict[str, Any] | None:
    return run_campaign(counted.campaign(), journals=folder, results=folder / "results", **options)


def test_the_result_counts_every_case_and_lists_failures(tmp_path: Path) -> None:
    counted = Counted()
    result = run(counted, tmp_path)

    assert result is not None
    assert json.loads((tmp_path / "results/counted.json").read_text()) == result
    assert result["counts"] == {"error": 1, "odd": 5, "passed": 4}
    assert (result["cases"], result["seed"], result["passes"]) == (10, 4, False)
    assert [f["case"] for f in result["failures"]] == ["4-1", "4-3", "4-5", "4-7", "4-8", "4-9"]
    (error,) = (f for f in result["failures"] if f["verdict"] == "error")
    assert error["why"] == "ValueError: eight"
    assert result["figures"] == {"sum": 74}
    assert is_full(counted.campaign(), result)
    assert not is_full(Counted(11).campaign(), result)


def test_an_interrupted_campaign_continues(tmp_path: Path) -> None:
    first = Counted(stops_at="4-6")
    with contextlib.suppress(KeyboardInterrupt):
        run(first, tmp_path)
    journal = tmp_path / "counted.jsonl"
    journal.write_text(journal.read_text() + '{"case": "4-6", "outc')  # cut off within a line

    second = Counted()
    assert run(second, tmp_path, limit=1) is None
    third = Counted()
    result = run(third, tmp_path)

    assert first.ran == ["4-0", "4-1", "4-2", "4-3", "4-4", "4-5"]
    assert (second.ran, third.ran) == (["4-6"], ["4-7", "4-8", "4-9"])
    assert result is not None
    assert result["cases"] == 10


def test_cases_of_another_process_stay_in_the_journal(tmp_path: Path) -> None:
    run(Counted(5), tmp_path)
    run(Counted(2), tmp_path)
    again = Counted(5)
    run(again, tmp_path)

    assert again.ran == []


def test_cases_that_came_are_run_and_those_that_went_are_not_counted(tmp_path: Path) -> None:
    run(Counted(3), tmp_path)
    more, fewer = Counted(5), Counted(2)
    assert run(more, tmp_path) is not None
    result = run(fewer, tmp_path)

    assert (more.ran, fewer.ran) == (["4-3", "4-4"], [])
    assert result is not None
    assert result["cases"] == 2


def test_outcomes_of_another_seed_are_not_counted(tmp_path: Path) -> None:
    run(Counted(3), tmp_path)
    again = Counted(3)
    other = attrs.evolve(again.campaign(), seed=5, cases=lambda seed: ["4-0", "4-1", "4-2"])
    run_campaign(other, journals=tmp_path, results=tmp_path / "results")

    assert again.ran == ["4-0", "4-1", "4-2"]


class Reaching(Counted):
    """The same, each case of which reaches the code of its number's parity."""

    def __init__(self, **code: str) -> None:
        super().__init__(8)
        self.code = {"even": "a", "odd": "b", **code}

    def campaign(self) -> Campaign:
        return attrs.evolve(super().campaign(), reach=self.reach)

    def reach(self, case: str) -> str:
        return self.code["odd" if int(case[-1]) % 2 else "even"]


@pytest.mark.parametrize("journal_is_left", [True, False])
def test_only_cases_whose_code_changed_run_again(tmp_path: Path, journal_is_left: bool) -> None:
    run(Reaching(), tmp_path)
    again = Reaching(even="c")
    if not journal_is_left:
        (tmp_path / "counted.jsonl").unlink()
    result = run(again, tmp_path)

    failed = [] if journal_is_left else ["4-1", "4-3", "4-5", "4-7"]
    assert again.ran == sorted(["4-0", "4-2", "4-4", "4-6", *failed])
    assert result is not None
    assert result["counts"] == {"odd": 4, "passed": 4}


def test_new_cases_run_beside_the_records_of_changed_code(tmp_path: Path) -> None:
    first = Reaching()
    first.count = 5
    run(first, tmp_path)
    (tmp_path / "counted.jsonl").unlink()
    again = Reaching(even="c")
    result = run(again, tmp_path, new=True)

    assert again.ran == ["4-1", "4-3", "4-5", "4-6", "4-7"]
    assert result is not None
    assert [group["reach"] for group in result["records"]] == ["a", "a", "a", "c"]
    later = Reaching(even="c")
    run(later, tmp_path)
    assert later.ran == ["4-0", "4-2", "4-4"]


def test_another_checkout_runs_no_case_that_passed(tmp_path: Path) -> None:
    first = run(Reaching(), tmp_path)
    (tmp_path / "counted.jsonl").unlink()
    again = Reaching()
    result = run(again, tmp_path)

    assert again.ran == ["4-1", "4-3", "4-5", "4-7"]
    assert first is not None
    assert result is not None
    assert {**result, "seconds_of_last_call": 0} == {**first, "seconds_of_last_call": 0}
    (tmp_path / "counted.jsonl").unlink()
    fresh = Reaching()
    run(fresh, tmp_path, fresh=True)
    assert len(fresh.ran) == 8


def test_outcomes_are_in_the_result_by_their_hash(tmp_path: Path) -> None:
    result = run(Reaching(), tmp_path)
    assert result is not None
    names = [group.pop("cases").split() for group in result["records"]]
    assert names == [[digest(f"4-{index}")] for index in (0, 2, 4, 6)]
    twice = [group["outcome"].pop("twice") for group in result["records"]]
    assert twice == [0, 4, 8, 12]
    assert [group["reach"] for group in result["records"]] == ["a"] * 4
    assert "records" not in (run(Counted(), tmp_path / "other") or {})


def test_a_sample_is_seeded() -> None:
    campaign = Counted().campaign()

    assert sample(campaign, 4) == sample(campaign, 4)
    assert sample(campaign, 4) != sample(campaign, 4, seed=1)
    assert len(sample(campaign, 40)) == 10


def test_every_campaign_is_found_by_its_name() -> None:
    assert [find(name).name for name in names()] == names()
