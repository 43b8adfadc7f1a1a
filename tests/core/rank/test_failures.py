from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from ascend_run.core.rank.failures import (
    FILE_VARIABLE,
    Failure,
    describe_failure,
    read_failure,
    record_failure,
)
from ascend_run.plugin_api import DataError, StorageError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    return path


def test_what_is_recorded_is_read_back(file: Path) -> None:
    record_failure(DataError("corrupt", ["file x"]), rank=3, phase="start")
    failure = read_failure(file)
    assert failure is not None
    assert attrs.evolve(failure, time=0) == Failure(
        rank=3,
        time=0,
        phase="start",
        summary="corrupt",
        text="corrupt:\n  file x",
        exit_code=2,
        is_refusal=True,
    )


def test_torchrun_can_read_it_too(file: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    record_failure(ValueError("boom"), rank=0)
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert read.message["message"] == "ValueError: boom"
    assert read.timestamp > 0


def test_the_first_record_of_a_rank_counts(file: Path) -> None:
    record_failure(ValueError("first"), rank=0)
    record_failure(ValueError("second"), rank=0)
    failure = read_failure(file)
    assert failure is not None
    assert failure.summary == "ValueError: first"


def test_nothing_is_recorded_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    record_failure(ValueError("x"), rank=0)


def test_a_disk_that_refuses_the_record_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "nowhere" / "error.json"))
    record_failure(StorageError("the disk is full"), rank=1)
    assert capsys.readouterr().out == "rank 1: the disk is full\n"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "x"}', '{"ascend_run": {"a": 1}}'])
def test_what_is_no_record_is_none(file: Path, content: str) -> None:
    file.write_text(content)
    assert read_failure(file) is None


def test_a_record_is_published_whole(file: Path) -> None:
    record_failure(ValueError("x"), rank=0)
    assert [path.name for path in file.parent.iterdir()] == ["error.json"]
    assert json.loads(file.read_text())["ascend_run"]["rank"] == 0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Read error: Connection reset by peer"), True),
        (BrokenPipeError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("connection closed by peer"), False),
        (DataError("corrupt"), False),
    ],
)
def test_a_lost_connection_is_distinguished_from_a_failure(error: Exception, lost: bool) -> None:
    assert describe_failure(error, rank=0, phase="run").lost_peer is lost


def test_an_error_raised_from_a_lost_connection_is_one() -> None:
    error = StorageError("could not agree")
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert describe_failure(error, rank=0, phase="run").lost_peer
