"""Expected against measured step time, and the calibration that it stands on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from ascend_run.tools.plan.cost_model.devices import CALIBRATION, CostDevice, find_device
from ascend_run.tools.plan.cost_model.step_time import StepTime
from benchmarks import cpu_calibration, cpu_calibration_rank, step_times


@pytest.mark.parametrize(("predicted", "measured", "percent"), [(110, 100, 10), (80, 100, 20)])
def test_an_error_counts_in_both_directions(
    predicted: float, measured: float, percent: float
) -> None:
    assert step_times.off_by(predicted, measured) == pytest.approx(percent)


def test_a_row_names_parts_of_the_estimate() -> None:
    assert {*step_times.PARTS} <= {*attrs.fields_dict(StepTime)}


def test_a_step_is_the_median_after_a_third_that_warms_up(tmp_path: Path) -> None:
    seconds = [9.0, 8.0, 3.0, 1.0, 2.0, 4.0]
    lines = [json.dumps({"loss": 1.0, "step_seconds": s}) for s in seconds]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step_seconds": 77.0}']) + "\n")

    assert step_times._step_seconds(tmp_path) == 2.5


def test_the_processors_constants_are_what_the_calibration_wrote() -> None:
    values = json.loads(CALIBRATION.read_text())

    assert find_device("cpu") == CostDevice(**values)
    assert values["source"].startswith("measured")


def test_rates_of_a_disk_include_its_writes_and_no_page_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes, written, dropped, now = 3 * 2**20, 0.25, 0.125, [0.0]

    def fsync(descriptor: int) -> None:
        now[0] += written

    def fadvise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        now[0] += dropped

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    # Only these take time, so a rate is exact, and a run without its call divides by no time.
    monkeypatch.setattr(cpu_calibration_rank, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    assert cpu_calibration.disk_rates(tmp_path, nbytes) == (nbytes / written, nbytes / dropped)
    assert not any(tmp_path.iterdir())


def test_a_calibration_writes_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calibration, "machine", lambda name, folder: {
        **json.loads(CALIBRATION.read_text()), "name": name, "latency": 1.23456789e-5,
    })  # fmt: skip
    path = tmp_path / "mine.json"

    cpu_calibration.main([str(path)])

    found = find_device(str(path))
    assert (found.name, found.latency) == ("this machine", 1.235e-5)
