"""Write files atomically and durably. Torch-free."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

FILE_MODE = 0o640


def replace_file(path: Path, text: str, *, mode: int = FILE_MODE) -> None:
    """Write a temporary file, sync it and rename it, so that readers never see a partial file.

    Raises:
        OSError: The write failed. The old file stays, and the temporary file is removed.
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
    """Sync the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
