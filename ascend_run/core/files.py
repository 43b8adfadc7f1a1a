"""Files that appear whole or not at all, and names that last. Torch-free."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

FILE_MODE = 0o640


def replace_file(path: Path, text: str, *, mode: int = FILE_MODE) -> None:
    """Write beside, make durable and rename, so that a reader never sees half a file.

    Raises:
        OSError: The file system refused; what was there stays, and nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path | str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
