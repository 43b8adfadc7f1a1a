"""A file that grows by full lines, one write each: a killed run truncates at most the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from ascend_run.core.files import FILE_MODE
from ascend_run.plugin_api.errors import StorageError

FOLDER_MODE = 0o750


class AppendedLines:
    """A text file opened for appending; several processes may append to the same file.

    Each line is one unbuffered ``write`` in append mode: on a local file system, lines of different
    processes are not interleaved, and readers see all lines written.

    Args:
        path: Created if missing (mode 640), with its folder (mode 750).

    Raises:
        StorageError: The file cannot be opened; :meth:`append` raises it if a write fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor: int | None = os.open(path, flags, FILE_MODE)
        except OSError as error:
            raise self._storage_error(error) from error

    def append(self, line: str) -> None:
        """Write one line and a newline."""
        descriptor = self._open_descriptor()
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:  # a nearly full disk may accept part of the data
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            raise self._storage_error(error) from error

    def end_torn_line(self) -> None:
        """End a line that a killed process left incomplete, so that the next one is valid."""
        descriptor = self._open_descriptor()
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            self.append("")

    def close(self) -> None:
        """Close the file. Calling it twice is allowed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, f"{self.path} is closed"
        return self._descriptor

    def _storage_error(self, error: OSError) -> StorageError:
        reason = error.strerror or type(error).__name__
        return StorageError(
            f"cannot write {self.path}",
            [f"{reason}; free space or fix the permissions, or choose another run.output_dir"],
        )
