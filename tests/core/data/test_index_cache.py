"""Arrays are computed once, by the first process, and never partly written."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.plugin_api import Arrays, StorageError

DESCRIPTION = {"kind": "squares", "count": 1000}


def squares() -> Arrays:
    return {"squares": np.arange(1000, dtype=np.int64) ** 2}


def counted_squares(calls: Path) -> Arrays:
    with calls.open("a") as stream:
        stream.write("computed\n")
    time.sleep(0.2)  # long enough for the others to arrive at the lock
    return squares()


def build(folder: Path, calls: Path, barrier: object, results: object) -> None:
    barrier.wait(30)
    arrays = IndexCache(folder).arrays(DESCRIPTION, lambda: counted_squares(calls))
    results.put(int(arrays["squares"].sum()))


def test_eight_processes_at_once_compute_it_once_and_all_read_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    arguments = (tmp_path / "cache", tmp_path / "calls", barrier, results)
    processes = [context.Process(target=build, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    sums = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 8
    assert sums == [int(squares()["squares"].sum())] * 8
    assert (tmp_path / "calls").read_text() == "computed\n"


def test_a_set_is_computed_once_per_description(
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


def test_an_interrupted_computation_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)

    def interrupted() -> Arrays:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.arrays(DESCRIPTION, interrupted)
    assert len(cache.arrays(DESCRIPTION, squares)["squares"]) == 1000


def permuted(path: Path) -> None:
    np.save(path, np.load(path)[::-1])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def removed(path: Path) -> None:
    path.unlink()


def joined(path: Path) -> None:
    """By an unexpected file."""
    np.save(path.with_name("cubes.npy"), np.arange(3))


def of_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def foreign(path: Path) -> None:
    """A whole set that was computed from something else."""
    other = path.parent.parent.parent / "other"
    IndexCache(other).arrays({**DESCRIPTION, "count": 2}, lambda: {"squares": np.ones(1000)})
    (source,) = other.glob("*/squares.npy")
    shutil.rmtree(path.parent)
    shutil.copytree(source.parent, path.parent)


def of_an_earlier_version(path: Path) -> None:
    (path.parent / "record.json").rename(path.parent / "description.json")


def in_place_of_the_folder(path: Path) -> None:
    folder = path.parent
    shutil.rmtree(folder)
    folder.write_text("")


def by_a_dangling_link(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.symlink_to("nowhere")


DAMAGES = [
    permuted, truncated, emptied, removed, joined, of_a_folder, foreign, of_an_earlier_version,
    in_place_of_the_folder, by_a_dangling_link,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_set_is_computed_anew_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cache = IndexCache(tmp_path / "cache")
    cache.arrays(DESCRIPTION, squares)
    (path,) = tmp_path.glob("cache/*/squares.npy")
    damage(path)
    with capture_logs() as events:
        arrays = cache.arrays(DESCRIPTION, squares)
    assert [*arrays] == ["squares"]
    assert np.array_equal(arrays["squares"], squares()["squares"])
    (event,) = events
    assert (event["event"], event["log_level"]) == ("index_cache.damaged", "warning")
    assert event["folder"] == str(path.parent)
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {"lock", path.parent.name}
    with capture_logs() as events:
        cache.arrays(DESCRIPTION, squares)
    assert events == []


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_is_ever_used(kept: IndexCache, data: st.DataObject) -> None:
    """Of any byte of any file, the record and the headers of the arrays included."""
    folder = kept.path_of(DESCRIPTION)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with capture_logs() as events:
        arrays = kept.arrays(DESCRIPTION, squares_and_ones)
    assert [event["event"] for event in events] == ["index_cache.damaged"]
    for name, array in squares_and_ones().items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)


def squares_and_ones() -> Arrays:
    return {**squares(), "ones": np.ones((3, 2), dtype=np.float32)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> IndexCache:
    """A cache that holds a set."""
    cache = IndexCache(tmp_path_factory.mktemp("kept"))
    cache.arrays(DESCRIPTION, squares_and_ones)
    return cache


def test_arrays_are_never_unpickled_whatever_their_record_says(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays(DESCRIPTION, squares)
    path = cache.path_of(DESCRIPTION) / "squares.npy"
    content = b"\x80\x04\x95a pickle."
    path.write_bytes(content)
    record = json.loads((path.parent / "record.json").read_text())
    crc32 = f"{zlib.crc32(content):08x}"
    record["files"][path.name] = {"size_bytes": len(content), "crc32": crc32}
    (path.parent / "record.json").write_text(json.dumps(record))
    assert np.array_equal(cache.arrays(DESCRIPTION, squares)["squares"], squares()["squares"])


def test_a_valid_index_in_a_read_only_folder_is_used(tmp_path: Path) -> None:
    IndexCache(tmp_path).arrays(DESCRIPTION, squares)
    with read_only():
        assert len(IndexCache(tmp_path).arrays(DESCRIPTION, squares)["squares"]) == 1000


def test_a_damaged_set_that_cannot_be_replaced_is_refused_with_its_folder(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays(DESCRIPTION, squares)
    folder = cache.path_of(DESCRIPTION)
    permuted(folder / "squares.npy")
    with read_only(), pytest.raises(StorageError, match="Read-only file system") as refused:
        cache.arrays(DESCRIPTION, squares)
    assert f"{folder} is damaged and cannot be replaced" in str(refused.value)
    assert "choose another data.cache_dir" in str(refused.value)


def test_a_file_system_that_forgets_what_is_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def forget(self: Path, target: Path) -> Path:
        permuted(self / "squares.npy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", forget)
    with pytest.raises(StorageError, match="read back differs"):
        IndexCache(tmp_path).arrays(DESCRIPTION, squares)


@contextmanager
def read_only() -> Iterator[None]:
    """A file system on which opening a file for writing fails, whatever the user's rights."""
    path_open = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wxa+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return path_open(self, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        yield
