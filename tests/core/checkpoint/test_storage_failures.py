"""A file system that refuses: one message on every rank, nothing half-published, nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.checkpoint import FileStore
from ascend_run.plugin_api import CheckpointError, StorageError

from .tensors import load_two_tensors, numbers, rows, save_two_tensors
from .thread_ranks import ThreadRanks, on_ranks

Refuse = Callable[..., None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Make a call of ``os`` fail from its n-th time on, as the kernel would."""

    def plant(name: str, code: int, at: int = 1, only: str = "") -> None:
        call, seen = getattr(os, name), [0]

        def refusing(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if type(target) is int else str(target)
            seen[0] += only in path
            if only in path and seen[0] >= at:
                raise OSError(code, os.strerror(code))
            return call(target, *args, **kwargs)

        monkeypatch.setattr(os, name, refusing)

    return plant


FAILURES = [
    ("mkdir", errno.EROFS, "", "Read-only file system (EROFS)"),
    ("mkdir", errno.EACCES, "", "Permission denied (EACCES)"),
    ("open", errno.EMFILE, "rank_0001", "Too many open files (EMFILE)"),
    ("write", errno.ENOSPC, "rank_0000", "No space left on device (ENOSPC)"),
    ("write", errno.ENOSPC, "rank_0001", "No space left on device (ENOSPC)"),
    ("write", errno.EDQUOT, "rank_0001", "(EDQUOT)"),
    ("write", errno.EIO, "manifest", "Input/output error (EIO)"),
    ("fsync", errno.EIO, "rank_0001", "Input/output error (EIO)"),
    ("fsync", errno.EIO, "manifest", "Input/output error (EIO)"),
    ("preadv", errno.EIO, "rank_0001", "Input/output error"),
    ("rename", errno.EACCES, "tmp-", "Permission denied (EACCES)"),
]


@pytest.mark.parametrize(
    ("call", "code", "only", "named"),
    FAILURES,
    ids=[f"{c}-{errno.errorcode[n]}-{o}" for c, n, o, _ in FAILURES],
)
def test_a_rejection_on_one_rank_is_one_error_on_all_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Refuse,
    call: str,
    code: int,
    only: str,
    named: str,
) -> None:
    """The run can continue afterwards."""
    save_two_tensors(tmp_path, 1)

    def save(ranks: ThreadRanks) -> Any:
        shards = [rows("t", numbers(8, 4), ranks.rank, 2)]
        return FileStore(tmp_path, ranks=ranks).save(2, shards, {})

    refuse(call, code, only=only)
    errors = on_ranks(2, save)
    monkeypatch.undo()
    assert all(isinstance(error, StorageError) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    assert named in str(errors[0])
    assert "cannot save checkpoint" in str(errors[0])
    assert str(tmp_path) in str(errors[0])
    if call in ("write", "mkdir") and only != "manifest":
        assert "128 bytes needed" in str(errors[0])
        assert "bytes free" in str(errors[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_two_tensors(tmp_path, 1)
    assert on_ranks(2, save) == [str(tmp_path / "step_00000002")] * 2


def test_a_disk_that_fills_up_half_way_names_the_rank_and_leaves_nothing(
    tmp_path: Path, refuse: Refuse
) -> None:
    refuse("write", errno.ENOSPC, at=2, only="rank_0001")

    def save(ranks: ThreadRanks) -> Any:
        shards = [rows("t", numbers(8, 4), ranks.rank, 2)]
        return FileStore(tmp_path, ranks=ranks).save(2, shards, {})

    for error in on_ranks(2, save):
        assert "rank 1: " in str(error)
        assert "rank 0: " not in str(error)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_found_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    save_two_tensors(tmp_path, 1)
    full = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, 100

    assert full.f_bavail * full.f_frsize > 100
    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    refuse("open", errno.EIO)
    with pytest.raises(StorageError, match="232 bytes needed, 100 bytes free; make room or point"):
        save_two_tensors(tmp_path, 2)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    save_two_tensors(tmp_path, 1)
    refuse("rename", errno.EACCES, only="step_00000001")
    save_two_tensors(tmp_path, 2, keep_last=1)
    assert FileStore(tmp_path).steps() == [1, 2]
    assert "could not be removed" in caplog.text


def test_a_folder_that_cannot_be_listed_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Not a directory \(ENOTDIR\)"):
        FileStore(tmp_path / "file").steps()
    with pytest.raises(StorageError, match="file"):
        save_two_tensors(tmp_path / "file", 1)


def test_a_read_error_while_loading_names_the_file(tmp_path: Path, refuse: Refuse) -> None:
    save_two_tensors(tmp_path, 1)
    store = FileStore(tmp_path)
    store.verify(1)
    refuse("preadv", errno.EIO, only="rank_0000")
    with pytest.raises(CheckpointError, match=r"rank_0000.safetensors: Input/output error"):
        load_two_tensors(tmp_path, 1)
