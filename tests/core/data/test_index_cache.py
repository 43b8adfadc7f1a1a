"""Arrays computed once, whoever asks first, and never half there."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ascend_run.core.data.index_cache import Arrays, IndexCache
from ascend_run.plugin_api import DataError, StorageError

DESCRIPTION = {"kind": "squares", "count": 1000}


def squares() -> Arrays:
    return {"squares": np.arange(1000, dtype=np.int64) ** 2}


def counted_squares(calls: Path) -> Arrays:
    with calls.open("a") as stream:
        stream.write("computed\n")
    time.sleep(0.2)  # long enough for the others to arrive at the lock
    return squares()


def build(folder: Path, calls: Path, barrier: object, answers: object) -> None:
    barrier.wait(30)
    arrays = IndexCache(folder).arrays(DESCRIPTION, lambda: counted_squares(calls))
    answers.put(int(arrays["squares"].sum()))


def test_eight_processes_at_once_compute_it_once_and_all_read_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(8), context.Queue()
    arguments = (tmp_path / "cache", tmp_path / "calls", barrier, answers)
    processes = [context.Process(target=build, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    sums = [answers.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 8
    assert sums == [int(squares()["squares"].sum())] * 8
    assert (tmp_path / "calls").read_text() == "computed\n"


def test_another_description_is_another_set_and_the_same_one_is_not_computed_again(
    tmp_path: Path,
) -> None:
    cache = IndexCache(tmp_path)
    first = cache.arrays(DESCRIPTION, squares)
    assert np.array_equal(cache.arrays(DESCRIPTION, dict)["squares"], first["squares"])
    other = cache.arrays({**DESCRIPTION, "count": 2}, lambda: {"ones": np.ones(2)})
    assert list(other) == ["ones"]


def test_without_locks_the_first_publication_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    cache = IndexCache(tmp_path)

    def overtaken() -> Arrays:
        cache.arrays(DESCRIPTION, squares)
        return {"squares": np.zeros(1)}

    assert np.array_equal(cache.arrays(DESCRIPTION, overtaken)["squares"], squares()["squares"])
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        IndexCache(tmp_path).arrays(DESCRIPTION, squares)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_folder_that_may_not_be_looked_into_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refused(path: object, *args: object, **options: object) -> os.stat_result:
        if str(tmp_path) in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(path, *args, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(StorageError, match="Permission denied; choose a folder that you may"):
        IndexCache(tmp_path).arrays(DESCRIPTION, squares)


def test_an_interrupted_computation_leaves_nothing_and_gives_the_lock_back(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)

    def interrupted() -> Arrays:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.arrays(DESCRIPTION, interrupted)
    assert len(cache.arrays(DESCRIPTION, squares)["squares"]) == 1000


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"\x80\x04\x95a pickle."])
def test_broken_arrays_are_refused_with_the_folder_and_never_unpickled(
    tmp_path: Path, content: bytes
) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays(DESCRIPTION, squares)
    (path,) = tmp_path.glob("*/squares.npy")
    path.write_bytes(content)
    with pytest.raises(DataError, match="remove that folder") as refusal:
        cache.arrays(DESCRIPTION, squares)
    assert str(path.parent) in str(refusal.value)
