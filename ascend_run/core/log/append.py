"""A file that grows by whole lines, each written at once: a killed run tears at most the last."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ascend_run.core.files import FILE_MODE
from ascend_run.plugin_api.errors import StorageError

FOLDER_MODE = 0o750


class AppendedLines:
    """A text file opened for appending; several processes may append to the same one.

    Each line is one unbuffered ``write`` in append mode: on a local file system lines of different
    processes do not mix, and a reader sees everything up to the last line.

    Args:
        path: Created where it is missing (mode 640), with its folder (mode 750).

    Raises:
        StorageError: The file system refused; from the constructor and from ``append``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor: int | None = os.open(path, flags, FILE_MODE)
        except OSError as error:
            raise self._refused(error) from error

    def append(self, line: str) -> None:
        """Write one line; its end is added."""
        descriptor = self._open_descriptor()
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:  # a nearly full disk takes a part, and refuses the next one
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            raise self._refused(error) from error

    def end_torn_line(self) -> None:
        """Close the line that a killed process left open, so that the next one starts afresh."""
        descriptor = self._open_descriptor()
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            self.append("")

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, f"{self.path} is closed"
        return self._descriptor

    def _refused(self, error: OSError) -> StorageError:
        reason = error.strerror or type(error).__name__
        return StorageError(
            f"cannot write {self.path}",
            [f"{reason}; free space or fix the permissions, or choose another run.output_dir"],
        )
