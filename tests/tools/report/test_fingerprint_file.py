"""The file of fingerprints: superseded by a resumption, whole after a kill, of one format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.fingerprint.record import FILE_NAME, writer
from ascend_run.plugin_api import DataError
from ascend_run.tools.pages.fingerprint_file import read_fingerprints


def entry(step: int, loss: float | None = 1.5, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "fingerprint": f"{step:016x}",
        "loss": loss,
        "grad_norm": None,
        "parameters": "00000000000000ff",
        "consumed_samples": 2 * step,
        **fields,
    }


def write(folder: Path, steps: range, start: int = 0, loss: float = 1.5) -> None:
    with writer(folder, start) as file:
        for step in steps:
            file.write(entry(step, loss))


def losses(folder: Path) -> dict[int, float | None]:
    return {step: e.loss for step, e in read_fingerprints(folder).entries.items()}


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    with writer(tmp_path, 0) as file:
        file.write(entry(0, None))
        file.write(entry(1, float("nan"), grad_norm=float("inf"), parameters=None))
    first, second = read_fingerprints(tmp_path).entries.values()
    assert (first.step, first.loss, first.parameters) == (0, None, "00000000000000ff")
    assert str(second.loss) == "nan"
    assert second.grad_norm == float("inf")
    assert second.parameters is None
    assert second.consumed_samples == 2


def test_a_resumed_run_supersedes_the_entries_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    write(tmp_path, range(4, 6), start=3, loss=2.5)
    assert losses(tmp_path) == {0: 1.5, 1: 1.5, 2: 1.5, 3: 1.5, 4: 2.5, 5: 2.5}
    assert read_fingerprints(tmp_path).superseded == 2


def test_a_fresh_run_in_the_same_folder_supersedes_everything(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    write(tmp_path, range(2), loss=2.5)
    assert losses(tmp_path) == {0: 2.5, 1: 2.5}


@pytest.mark.parametrize("kept", [1, 30, -2])
def test_the_torn_last_line_of_a_killed_run_is_left_out(tmp_path: Path, kept: int) -> None:
    write(tmp_path, range(3))
    path = tmp_path / FILE_NAME
    *whole, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole) + last[:kept])
    assert [*losses(tmp_path)] == [0, 1]
    assert read_fingerprints(tmp_path).problems == ()
    write(tmp_path, range(2, 4), start=1)
    assert [*losses(tmp_path)] == [0, 1, 2, 3]
    assert read_fingerprints(tmp_path).problems == ()


@pytest.mark.parametrize(
    "damage",
    [
        {"fingerprint": "zz"},
        {"loss": "much"},
        {"parameters": 3},
        {"consumed_samples": float("inf")},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_an_entry_that_is_none_is_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    with writer(tmp_path, 0) as file:
        file.write(entry(1))
        file.write(entry(2, **damage))
    found = read_fingerprints(tmp_path)
    assert [*found.entries] == [1]
    assert found.problems == ("the line of step 2 is not a fingerprint; left out",)


def test_another_format_is_refused_with_both_named(tmp_path: Path) -> None:
    line = json.dumps({"event": "start", "format": 2})
    (tmp_path / FILE_NAME).write_text(f"{line}\n{json.dumps(entry(1))}\n")
    with pytest.raises(DataError, match=r"has format 2, and this version reads format 1"):
        read_fingerprints(tmp_path)


def test_a_run_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no fingerprint\.jsonl"):
        read_fingerprints(tmp_path)
