"""Write files atomically and durably. Torch-free."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Final

from ascend_run.plugin_api.errors import StorageError

FILE_MODE: Final = 0o640
_ADVICE: Final = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some of your quota or choose another folder",
    errno.EFBIG: "raise the limit on file sizes or choose another file system",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that you may write, or ask for permission",
    errno.EPERM: "choose a folder that you may write, or ask for permission",
}


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


def storage_error(path: Path | str, error: OSError) -> StorageError:
    """Convert an OSError to a StorageError with advice."""
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0, "check the path and the file system")
    return StorageError(f"cannot write {path}: {reason}; {advice}")
