"""Rows: medians of pairs, limits, and what must never vanish from the table."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from benchmarks.catalogue import all_benchmarks
from benchmarks.rows import (
    RESULTS,
    Row,
    bounded,
    compared,
    failed,
    pair_ratios,
    print_table,
    read_rows,
    rounded,
    unmeasured,
    write_rows,
)

SPEED = {"name": "speed", "unit": "tokens/s", "note": "a note", "device": "cpu"}
COST = {"name": "cost", "unit": "ns", "note": "a note", "device": "cpu"}


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    row = compared(ours=[10, 30, 100], peer=[10, 10, 90], goal=1.1, **SPEED)
    assert (row.ours, row.peer) == (30, 10)
    assert row.ratio == rounded(100 / 90)
    assert row.note == "3 pairs, 1.000 to 3.000 x; a note"


def test_a_ratio_above_one_means_that_ours_is_better_whatever_the_unit() -> None:
    assert pair_ratios([2.0], [1.0]) == [2.0]
    assert pair_ratios([2.0], [1.0], larger_is_better=False) == [0.5]


@pytest.mark.parametrize(("ours", "met"), [(134.9, False), (135.0, True), (140.0, True)])
def test_a_goal_is_met_from_just_the_goal_on(ours: float, met: bool) -> None:
    row = compared(ours=[ours], peer=[100.0], goal=1.35, **SPEED)
    assert row.goal == ">= 1.35 x"
    assert row.met is met


@pytest.mark.parametrize(("value", "met"), [(80.0, True), (80.1, False)])
def test_a_limit_is_kept_up_to_just_the_limit(value: float, met: bool) -> None:
    row = bounded(value=value, limit=80, peer=800.0, **COST)
    assert row.goal == "<= 80 ns"
    assert row.met is met
    assert row.ratio == rounded(800 / value)


def test_pairs_that_are_not_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compared(ours=[1.0, 2.0], peer=[1.0], goal=1, **SPEED)


def test_what_was_not_measured_or_must_not_count_is_a_row_that_is_not_met() -> None:
    absent = unmeasured(name="speed", goal=">= 1 x", reason="no such peer", device="cpu")
    assert not absent.met
    assert absent.note == "not measured: no such peer"
    assert absent.margin() is None
    good = compared(ours=[2.0], peer=[1.0], goal=1, **SPEED)
    bad = failed(good, "other losses")
    assert good.met
    assert not bad.met
    assert bad.note.startswith("FAILED: other losses; ")


def test_the_margin_is_one_where_the_goal_is_just_met() -> None:
    assert compared(ours=[2.7], peer=[1.0], goal=1.35, **SPEED).margin() == pytest.approx(2.0)
    assert bounded(value=160, limit=80, **COST).margin() == pytest.approx(0.5)


def test_the_table_names_every_row_and_says_no(capsys: pytest.CaptureFixture[str]) -> None:
    met = bounded(value=1, limit=80, **COST)
    print_table([met, unmeasured(name="gone", goal=">= 1 x", reason="no peer", device="cpu")])
    printed = capsys.readouterr().out
    assert "cost" in printed
    assert "gone" in printed
    assert "not measured: no peer" in printed


def test_rows_come_back_from_their_file_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    rows = [bounded(value=1, limit=80, **COST)]
    path = tmp_path / "results" / "rows.json"
    write_rows(rows, path)
    assert read_rows(path) == rows
    path.write_text('[{"name": "speed"}]')
    with pytest.raises(TypeError, match="missing"):
        read_rows(path)


def test_the_committed_figures_have_exactly_the_defined_rows() -> None:
    expected = [benchmark.name for benchmark in all_benchmarks()]
    assert len({*expected}) == len(expected)
    for path in RESULTS.parent.glob(RESULTS.name):
        assert [row.name for row in read_rows(path)] == expected


def test_the_figures_in_git_keep_to_the_types_of_a_row() -> None:
    number, text = (int, float, type(None)), (str,)
    types = {"ours": number, "peer": number, "ratio": number, "met": (bool,)}
    assert {*types} < {field.name for field in attrs.fields(Row)}
    for path in RESULTS.parent.glob(RESULTS.name):
        for row in read_rows(path):
            for name, value in attrs.asdict(row).items():
                assert isinstance(value, types.get(name, text)), (row.name, name, value)
