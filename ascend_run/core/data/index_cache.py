"""Arrays computed once per file system and shared by all ranks that see it.

A set of arrays is used only if it is unchanged: a record beside it holds its description and the
size and CRC-32 of each file. Every process checks the full set when it maps it (0.3 s per GB): once
per epoch, not per sample. A check by one process for all would need a process group; processes of
one machine share the page cache instead.

No process group is needed: a process that finds nothing takes a file lock, computes, and publishes
a folder by rename; the others wait for the lock and then find it. On file systems without locks the
rename keeps this correct, but arrays may be computed more than once. Arrays are stored without
pickles.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from ascend_run.core.file_ranges import range_crc32
from ascend_run.core.files import storage_error, sync_folder
from ascend_run.plugin_api import Arrays, RunConfig, StorageError

_RECORD: Final = "record.json"

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


_FORMAT: Final = 2
"""Version of the folder format; sets of other versions are left untouched."""


class IndexCache:
    """A folder of computed arrays, each set keyed by the hash of its description.

    Args:
        folder: Created on first use; may be shared by runs.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    @classmethod
    def of_run(cls, config: RunConfig) -> IndexCache:
        """Return the cache in ``data.cache_dir``."""
        return cls(config.data.cache_dir or Path(config.run.output_dir) / "index-cache")

    def path_of(self, description: Mapping[str, object]) -> Path:
        """Return the folder of a set of arrays."""
        content = json.dumps([_FORMAT, description], sort_keys=True)
        return self._folder / hashlib.sha256(content.encode()).hexdigest()[:32]

    def arrays(self, description: Mapping[str, object], compute: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a description, memory-mapped from files.

        Args:
            description: JSON values of everything that determines the arrays.
            compute: Called if the arrays are missing or damaged.

        Raises:
            StorageError: The folder cannot be read or written.
        """
        folder = self.path_of(description)
        is_damaged = False
        try:
            if (found := _read(folder, description)) is not None:
                return found
            is_damaged = os.path.lexists(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / "lock"):
                # Another process may have computed them meanwhile.
                if (found := _read(folder, description)) is not None:
                    return found
                _discard(folder)
                _publish(folder, description, compute())
            found = _read(folder, description)
        except OSError as error:
            if is_damaged:
                raise _cannot_replace(folder, error.strerror or str(error)) from error
            raise storage_error(folder, error) from error
        if found is None:
            raise _cannot_replace(folder, "data read back differs from what was written")
        return found


def _read(folder: Path, description: Mapping[str, object]) -> Arrays | None:
    """Return the arrays if they match their record; None if they are missing or do not match."""
    try:
        if (folder / _RECORD).read_bytes() != _record(folder, description):
            return None
        return {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in _files(folder)
        }
    # A file may vanish, be a folder, shrink during the checksum, or not be an array.
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, EOFError, ValueError):
        return None


def _record(folder: Path, description: Mapping[str, object]) -> bytes:
    """Return the exact content that the record of a folder must have, given its files."""
    files = {}
    for path in _files(folder):
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            crc32 = range_crc32(stream.fileno(), 0, size)
        files[path.name] = {"size_bytes": size, "crc32": crc32}
    return json.dumps({"description": description, "files": files}, sort_keys=True).encode()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npy"))


def _discard(folder: Path) -> None:
    """Remove a damaged set by rename first, so that no process reads a part of it."""
    if not os.path.lexists(folder):
        return
    structlog.get_logger().warning(
        "index_cache.damaged",
        folder=str(folder),
        meaning="it is not what was written there, and is recomputed",
    )
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
    folder.rename(aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def _cannot_replace(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"{folder} is damaged and cannot be replaced: {reason}; remove that folder, or choose "
        "another data.cache_dir"
    )


def _publish(folder: Path, description: Mapping[str, object], arrays: Arrays) -> None:
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("xb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
        with (partial / _RECORD).open("xb") as stream:
            stream.write(_record(partial, description))
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Without a working lock, another process may have published the same arrays first.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not folder.exists():
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        yield  # closing the file releases the lock
