"""Publish files atomically: write them under temporary names, then rename them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ascend_run.core.files import FILE_MODE, storage_error, sync_folder
from ascend_run.plugin_api import StorageError


class StagedFiles:
    """New files that get their names only in ``publish``, in the order in which they were opened.

    A context manager: unpublished files are removed on exit. An OSError inside becomes a
    StorageError, so the body must not read anything whose errors are unrelated to the output. A
    killed process leaves only hidden ``.NAME.*.partial`` files.

    Args:
        overwrite: Whether existing files may be replaced.
    """

    def __init__(self, *, overwrite: bool = False) -> None:
        self._overwrite = overwrite
        self._staged: dict[Path, tuple[Path, BinaryIO]] = {}
        self._current = Path()

    def __enter__(self) -> StagedFiles:
        return self

    def open(self, path: Path) -> BinaryIO:
        """Open a new binary file that will become ``path``.

        Raises:
            StorageError: ``path`` exists and may not be replaced.
        """
        assert path not in self._staged, f"{path} is opened twice"
        self._current = path
        self._require_free(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
        stream = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._staged[path] = (partial, stream)
        return stream

    def _require_free(self, path: Path) -> None:
        if path.exists() and not self._overwrite:
            raise StorageError(f"{path} exists already; name another output, or pass --overwrite")

    def publish(self) -> None:
        """Sync every file to disk, then rename each to its final name.

        Raises:
            StorageError: A file was created at one of the paths in the meantime.
        """
        for path in self._staged:
            self._require_free(path)
        for path, (_, stream) in self._staged.items():
            self._current = path
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        for path, (partial, _) in self._staged.items():
            self._current = path
            os.replace(partial, path)
        for folder in {path.parent for path in self._staged}:
            sync_folder(folder)
        self._staged.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for partial, stream in self._staged.values():
            _close_quietly(stream)
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(self._current, error) from error


def _close_quietly(stream: BinaryIO) -> None:
    """Close a file that is about to be removed; unflushed data need not reach the disk."""
    try:
        stream.close()
    except OSError:
        # The flush in close() fails on a full disk; the descriptor is closed regardless.
        return
