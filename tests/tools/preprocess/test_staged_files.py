"""Files appear whole or not at all, whatever the file system answers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import StorageError
from ascend_run.tools.preprocess.staged_files import StagedFiles


def write_two(folder: Path, content: bytes = b"new", overwrite: bool = True) -> None:
    with StagedFiles(overwrite=overwrite) as staged:
        staged.open(folder / "first").write(content)
        staged.open(folder / "second").write(content)
        staged.publish()


def test_files_get_their_names_together_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda source, target: (renamed.append(target), replace(source, target))
    )
    with StagedFiles() as staged:
        for name in ("c", "a", "b"):
            staged.open(tmp_path / "made" / name).write(name.encode())
        assert all(path.name.endswith(".partial") for path in (tmp_path / "made").iterdir())
        staged.publish()
    assert [path.name for path in renamed] == ["c", "a", "b"]
    assert {path.name: path.read_text() for path in (tmp_path / "made").iterdir()} == {
        name: name for name in "abc"
    }


def test_an_error_inside_leaves_nothing_new_behind(tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"old")

    def interrupted() -> None:
        with StagedFiles(overwrite=True) as staged:
            staged.open(tmp_path / "first").write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert (tmp_path / "first").read_bytes() == b"old"


def test_an_existing_file_is_kept_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "second").write_bytes(b"old")
    with pytest.raises(StorageError, match=r"second exists already.*--overwrite"):
        write_two(tmp_path, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    write_two(tmp_path)
    assert (tmp_path / "second").read_bytes() == b"new"


def test_a_file_that_appears_in_the_meantime_is_kept(tmp_path: Path) -> None:
    def overtaken() -> None:
        with StagedFiles() as staged:
            for name in ("first", "second"):
                staged.open(tmp_path / name).write(b"new")
            (tmp_path / "second").write_bytes(b"somebody's")
            staged.publish()

    with pytest.raises(StorageError, match="second exists already"):
        overtaken()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "second": b"somebody's"
    }


def failing(number: int, skip: int) -> Callable[..., Any]:
    """A system call that works ``skip`` times and then answers with an error."""
    calls = [0]
    fsync = os.fsync

    def call(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > skip:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    return call


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EIO, "check the path")],
)
def test_a_full_disk_is_one_message_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str, skip: int
) -> None:
    (tmp_path / "first").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", failing(number, skip))
    with pytest.raises(StorageError, match=f"{os.strerror(number)}.*{advice}") as refusal:
        write_two(tmp_path)
    assert str(tmp_path / ("first" if skip == 0 else "second")) in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert (tmp_path / "first").read_bytes() == b"old"


def test_a_write_that_the_system_cuts_short_is_a_storage_error(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from ascend_run.tools.preprocess.staged_files import StagedFiles\n"
        "from ascend_run.plugin_api import StorageError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with StagedFiles() as staged:\n"
        f"        staged.open(Path({str(tmp_path)!r}) / 'large').write(bytes(2**22))\n"
        "        staged.publish()\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_two(tmp_path / "file")
