"""The command: which runs may replace the figures in git, and that no row vanishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.protocol import Benchmark, NotMeasured, Settings
from benchmarks.rows import NO_GPU, Row, bounded, failed, read_rows, write_rows


def good(settings: Settings) -> Row:
    settings.report("good")
    return bounded(name="good", value=1, limit=2, unit="s", note="", device="cpu")


def bad(settings: Settings) -> Row:
    return failed(good(settings), "other losses")


def absent(settings: Settings) -> Row:
    raise NotMeasured("no such peer")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the command writes: of a full run, and of any other."""
    latest, partial = tmp_path / "latest.json", tmp_path / "partial.json"
    monkeypatch.setattr(command, "RESULTS", latest)
    monkeypatch.setattr(command, "PARTIAL", partial)
    return latest, partial


def no_gpu(settings: Settings) -> Row:
    raise NotMeasured("needs a GPU")


def run_with(monkeypatch: pytest.MonkeyPatch, arguments: list[str], *measures: object) -> int:
    found = [
        Benchmark(
            name=m.__name__,
            goal="<= 2 s",
            measure=m,
            device=lambda m=m: NO_GPU if m is no_gpu else "cpu",
        )
        for m in measures
    ]
    monkeypatch.setattr(command, "all_benchmarks", lambda: found)
    monkeypatch.setattr(command, "matching", lambda _: found)
    return command.main(arguments, say=lambda _: None)


def test_a_full_run_writes_all_rows_including_unmeasured_ones(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(monkeypatch, [], absent, good) == 1
    rows = read_rows(files[0])
    assert [row.name for row in rows] == ["absent", "good"]
    assert rows[0].note == "not measured: no such peer"
    assert not rows[0].met


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "x"], ["--pairs", "4"]])
def test_any_other_run_leaves_the_figures_alone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    assert run_with(monkeypatch, arguments, good) == 0
    assert not files[0].exists()
    assert [row.name for row in read_rows(files[1])] == ["good"]


@pytest.mark.usefixtures("files")
def test_a_row_that_must_not_count_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, [], good) == 0
    assert run_with(monkeypatch, [], good, bad) == 1


def test_a_pattern_without_a_row_and_pairs_below_one_are_refused() -> None:
    for arguments in (["--only", "no such row"], ["--pairs", "0"]):
        with pytest.raises(SystemExit) as refused:
            command.parse(arguments)
        assert refused.value.code == 2


def test_a_pattern_finds_rows_by_a_part_of_their_name() -> None:
    assert [b.name for b in command.matching("BF16*(aim)")] == [
        "step, 36M Llama bf16 vs litgpt compiled (aim)"
    ]


def test_missing_rows_are_added_in_catalogue_order_and_others_kept(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, [], good)
    assert run_with(monkeypatch, ["--missing"], absent, good) == 1
    assert [row.name for row in read_rows(files[0])] == ["absent", "good"]

    def never(settings: Settings) -> Row:
        raise AssertionError("it was there already")

    never.__name__ = "good"
    assert run_with(monkeypatch, ["--missing"], never) == 0
    assert [row.name for row in read_rows(files[0])] == ["good"]
    with pytest.raises(SystemExit):
        run_with(monkeypatch, ["--missing", "--pairs", "1"], good)


def test_a_row_that_waits_for_a_gpu_stands_in_the_table_and_is_no_error(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(monkeypatch, [], no_gpu, good) == 0
    row = read_rows(files[0])[0]
    assert (row.name, row.ours, row.device, row.met) == ("no_gpu", None, NO_GPU, False)
    assert row.note == "not measured: needs a GPU"


def test_a_figure_that_a_gpu_once_gave_stays_where_there_is_none(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = bounded(name="no_gpu", value=1, limit=2, unit="s", note="", device="NVIDIA H200")
    write_rows([once], files[0])
    assert run_with(monkeypatch, [], no_gpu, good) == 0
    assert [row.name for row in read_rows(files[0])] == ["no_gpu", "good"]
    assert read_rows(files[0])[0] == once
