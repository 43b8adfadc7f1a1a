"""Arrays computed once for each file system and then shared by every rank that sees it.

No process group is needed: whoever finds nothing takes a file lock, computes, and publishes a
folder by rename; the others wait for the lock and find it. Where a file system has no locks the
rename still makes it correct, only computed more than once. Arrays are stored without pickles.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_run.core.files import sync_folder
from ascend_run.plugin_api import DataError

from .publish import storage_error

Arrays = Mapping[str, NDArray[Any]]

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class IndexCache:
    """A folder of computed arrays, each set under the hash of what it was computed from.

    Args:
        folder: Made when it is first needed; may be shared by runs.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    def arrays(self, description: Mapping[str, Any], compute: Callable[[], Arrays]) -> Arrays:
        """The arrays for a description, mapped from files.

        Args:
            description: JSON values that decide the arrays, and everything that does.
            compute: Called where they are not there yet.

        Raises:
            StorageError: The folder cannot be read or written.
            DataError: Stored arrays are broken.
        """
        content = json.dumps(description, sort_keys=True)
        place = self._folder / hashlib.sha256(content.encode()).hexdigest()[:32]
        try:
            if not place.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                with _locked(self._folder / "lock"):
                    if not place.exists():
                        _publish(place, content, compute())
        except OSError as error:
            raise storage_error(place, error) from error
        return _load(place)


def _publish(place: Path, description: str, arrays: Arrays) -> None:
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("xb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
        (partial / "description.json").write_text(description)
        sync_folder(partial)
        partial.rename(place)
        sync_folder(place.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Without a working lock another process may have published the same arrays first.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not place.exists():
            raise


def _load(place: Path) -> Arrays:
    try:
        return {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
            for path in sorted(place.glob("*.npy"))
        }
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"the sample index {place} is broken ({error}); remove that folder, it is made again"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        yield  # closing the file gives the lock back
