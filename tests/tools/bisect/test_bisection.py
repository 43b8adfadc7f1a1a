"""The search: what it finds, in how many comparisons, and after an interruption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from ascend_run.tools.bisect.bisection import Bisection, bisect
from ascend_run.tools.bisect.choices import Choice, Compared, Kind, State
from ascend_run.tools.bisect.journal import Journal
from ascend_run.tools.bisect.search import smallest_failing
from ascend_run.tools.bisect.text import sentence, text_of

NAMES = tuple("abcdefgh")


class Stopped(Exception):
    """In place of Ctrl-C."""


class MadeUp:
    """Diverges if all of the guilty features are enabled."""

    choices = tuple(
        Choice(kind=Kind.PLUGIN, name=name, values=("not enabled", "enabled")) for name in NAMES
    )

    def __init__(self, *guilty: str, stop_after: int | None = None) -> None:
        self.guilty, self.stop_after = {*guilty}, stop_after
        self.compared: list[tuple[str, ...]] = []

    def with_needed(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(names))

    def __call__(self, names: Sequence[str]) -> Compared:
        if len(self.compared) == self.stop_after:
            raise Stopped
        changes = self.with_needed(names)
        self.compared.append(changes)
        if self.guilty <= {*names}:
            where = "decoder.layers.1.mlp (backward)"
            return Compared(
                changes=changes, state=State.DIVERGES, where=where, step=3, why="it is wrong"
            )
        return Compared(changes=changes, state=State.AGREES)


def searched(compare: MadeUp, folder: Path) -> Bisection:
    return bisect(compare, Journal(folder, {"run": 1}), lambda number, enabled: None)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 100])
def test_one_culprit_takes_at_most_log2_and_two_comparisons(count: int) -> None:
    names = [f"p{index}" for index in range(count)]
    for guilty in names:
        tried: set[frozenset[str]] = set()

        def fails(
            features: Sequence[str], guilty: str = guilty, tried: set[frozenset[str]] = tried
        ) -> bool:
            tried.add(frozenset(features))
            return guilty in features

        assert smallest_failing(names, fails) == (guilty,)
        assert len(tried) <= math.ceil(math.log2(count)) + 2


def test_a_culprit_among_eight_takes_six_comparisons_in_all(tmp_path: Path) -> None:
    for guilty in NAMES:
        compare = MadeUp(guilty)
        assert searched(compare, tmp_path).culprits == (guilty,)
        assert len(compare.compared) <= 6
        assert len({*compare.compared}) == len(compare.compared)


@pytest.mark.parametrize("guilty", [("a", "h"), ("c", "d"), ("a", "e", "f")], ids="".join)
def test_features_that_only_diverge_together_are_all_found(
    tmp_path: Path, guilty: tuple[str, ...]
) -> None:
    compare = MadeUp(*guilty)
    result = searched(compare, tmp_path)
    assert result.culprits == guilty
    assert len(compare.compared) <= len(guilty) * (3 + 1) + 2
    assert "only together" in sentence(result)


def test_a_run_that_does_not_diverge_is_compared_once(tmp_path: Path) -> None:
    compare = MadeUp("not enabled")
    result = searched(compare, tmp_path)
    assert result.culprits is None
    assert len(compare.compared) == 1
    assert sentence(result).startswith("nothing found")


def test_a_layout_that_diverges_by_itself_is_no_plugins_fault(tmp_path: Path) -> None:
    result = searched(MadeUp(), tmp_path)
    assert result.culprits == ()
    assert sentence(result).startswith("the layout makes the runs part")


@pytest.mark.parametrize("stop", range(8))
def test_an_interrupted_search_repeats_no_comparison(tmp_path: Path, stop: int) -> None:
    whole = MadeUp("c", "f")
    expected = searched(whole, tmp_path / "..")
    first = MadeUp("c", "f", stop_after=stop)
    with pytest.raises(Stopped):
        searched(first, tmp_path)
    second = MadeUp("c", "f")
    assert searched(second, tmp_path) == expected
    assert [*first.compared, *second.compared] == whole.compared
    assert not [*tmp_path.iterdir()]


def test_a_line_cut_off_by_a_kill_is_compared_again(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        searched(MadeUp("c", stop_after=3), tmp_path)
    (journal,) = tmp_path.iterdir()
    journal.write_text(journal.read_text()[:-10])
    again = MadeUp("c", stop_after=2)
    with pytest.raises(Stopped):
        searched(again, tmp_path)
    last = MadeUp("c")
    assert searched(last, tmp_path).culprits == ("c",)
    whole = MadeUp("c")
    searched(whole, tmp_path)
    assert [*again.compared, *last.compared] == whole.compared[2:]


def test_another_request_does_not_read_the_journal(tmp_path: Path) -> None:
    assert Journal(tmp_path, {"run": 1}).path != Journal(tmp_path, {"run": 2}).path


def test_the_verdict_comes_first_and_all_comparisons_follow(tmp_path: Path) -> None:
    lines = [*text_of(searched(MadeUp("c"), tmp_path))]
    assert lines[0] == (
        "plugin 'c' makes the runs part, at step 3, in decoder.layers.1.mlp (backward)"
    )
    assert lines[1:3] == [
        "why: it is wrong",
        "next: ascend-run verify --details --enable c",
    ]
    assert sum("DIVERGES" in line or "agrees" in line for line in lines) == 6
