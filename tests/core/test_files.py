"""A file that is replaced is the old one or the new one, and nothing is left beside it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from ascend_run.core.files import replace_file


def test_a_file_is_made_and_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("first", "second, with a letter: \u00e9"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 & ~current_umask()
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_refusal_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, "after")
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
