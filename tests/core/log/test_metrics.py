"""The metrics file: valid JSON, whole after a kill, true after a resumption."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.core.log.json_values import number
from ascend_run.core.log.metrics import MetricsWriter, read_metrics
from ascend_run.plugin_api import DataError, StorageError


def write_steps(path: Path, steps: range, loss: float, resume_step: int | None = None) -> None:
    with MetricsWriter(path, resume_step) as writer:
        for step in steps:
            writer.write({"step": step, "loss": loss})


def losses(path: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(path).records}


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 0, "eval_loss": 8.5})
        writer.write({"step": 1, "loss": 8.25, "expert_load": [0.25, 0.75], "skipped": False})
        writer.event("finish")
    history = read_metrics(path)
    assert [{**r, "time": None} for r in history.records] == [
        {"step": 0, "eval_loss": 8.5, "time": None},
        {"step": 1, "loss": 8.25, "expert_load": [0.25, 0.75], "skipped": False, "time": None},
    ]
    assert [event["event"] for event in history.events] == ["start", "finish"]
    assert history.problems == ()


def test_a_line_can_be_read_before_the_writer_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": 1.0})
        assert losses(path) == {1: 1.0}


def test_a_resumed_run_supersedes_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 9), loss=1.0)
    before = path.read_bytes()
    write_steps(path, range(6, 8), loss=2.0, resume_step=5)
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 2.0, 7: 2.0}
    assert read_metrics(path).superseded == 3
    assert path.read_bytes().startswith(before), "the file must be append-only"
    assert {"event": "resume", "step": 5}.items() <= json.loads(
        path.read_text().splitlines()[9]
    ).items()


def test_a_run_resumed_twice_keeps_the_newest_reading_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 9), loss=1.0)
    write_steps(path, range(7, 10), loss=2.0, resume_step=6)
    write_steps(path, range(3, 5), loss=3.0, resume_step=2)
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 3.0, 4: 3.0}


def test_a_fresh_run_in_the_same_folder_supersedes_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(9), loss=1.0)
    write_steps(path, range(2), loss=2.0)
    history = read_metrics(path)
    assert losses(path) == {0: 2.0, 1: 2.0}
    assert len(history.attempts) == 1
    assert [event["event"] for event in history.events] == ["start"]


def test_the_torn_last_line_of_a_killed_run_is_left_out_silently(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4), loss=1.0)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for length in range(last, len(whole) - 2):
        path.write_bytes(whole[:length])
        assert losses(path) == {1: 1.0, 2: 1.0}
        assert read_metrics(path).problems == ()


def test_a_run_continues_after_a_torn_line_without_losing_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4), loss=1.0)
    path.write_bytes(path.read_bytes()[:-9])
    write_steps(path, range(3, 5), loss=2.0, resume_step=2)
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert read_metrics(path).problems == ()


@pytest.mark.parametrize(
    "damage",
    [b"garbage\n", b'{"loss": 1}\n', b"[1, 2]\n", b'{"step": true}\n', b"[" * 99999 + b"\n"],
)
def test_a_corrupt_line_is_named_and_the_rest_read(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": 1.0})
        with path.open("ab") as foreign:
            foreign.write(damage)
        writer.write({"step": 2, "loss": 1.0})
    history = read_metrics(path)
    assert [record["step"] for record in history.records] == [1, 2]
    assert len(history.problems) == 1
    assert "line 3" in history.problems[0]


def test_a_corrupt_last_line_that_is_complete_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n')
    assert "line 2" in read_metrics(path).problems[0]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_can_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + data)
    assert read_metrics(path).records[0]["step"] == 1


def test_values_that_json_lacks_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        values = [math.nan, math.inf, -math.inf, np.float32("nan"), 1.5]
        writer.write({"step": 1, "values": values})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    back = [number(value) for value in read_metrics(path).records[0]["values"]]
    assert str(back) == "[nan, inf, -inf, nan, 1.5]"


def test_numpy_and_torch_readings_become_numbers(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(
            {
                "step": np.int64(3),
                "loss": torch.tensor(0.5, dtype=torch.float64),
                "lr": np.float32(0.25),
                "expert_load": torch.tensor([0.5, 0.5]),
            }
        )
    record = read_metrics(path).records[0]
    assert {k: record[k] for k in ("step", "loss", "lr", "expert_load")} == {
        "step": 3,
        "loss": 0.5,
        "lr": 0.25,
        "expert_load": [0.5, 0.5],
    }


def test_the_time_of_every_attempt_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"event": "start", "time": 100.0}\n'
        '{"step": 5, "time": 130.0}\n{"step": 9, "time": 150.0}\n'
        '{"event": "resume", "step": 5, "time": 500.0}\n{"step": 6, "time": 510.0}\n'
    )
    assert read_metrics(path).attempts == ((100.0, 150.0), (500.0, 510.0))


def test_the_file_is_private_to_owner_and_group(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "new" / "metrics.jsonl"
        write_steps(path, range(1, 2), loss=1.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


def test_a_full_disk_is_a_storage_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    write = os.write

    def nearly_full(descriptor: int, data: memoryview) -> int:
        if len(data) > 5:
            return write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl(.|\n)*No space left"):
        writer.write({"step": 1, "loss": 123456.0})
    monkeypatch.undo()
    writer.close()


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    write_steps(path, range(1, 3), loss=1.0)
    assert losses(path) == {1: 1.0, 2: 1.0}


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_metrics(tmp_path / "none.jsonl")


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys, pathlib\n"
        "from ascend_run.core.log.metrics import MetricsWriter\n"
        "writer = MetricsWriter(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 51): writer.write({'step': step, 'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert sorted(losses(path)) == list(range(1, 51))
