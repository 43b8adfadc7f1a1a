"""Write a folder under another name, and rename it when it is complete.

A process that is killed leaves ``.NAME.XXXXXXXX.partial`` beside the target. The next one that
writes the same target removes it: one in use has a lock, which its process holds.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ascend_run.core.files import sync_folder
from ascend_run.plugin_api.errors import StorageError
from ascend_run.text.file_collisions import NamedPath, refuse_collisions

_SUFFIX: Final = ".partial"


def refuse_taken(target: Path) -> None:
    """
    Raises:
        StorageError: The target exists and is not empty.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise StorageError(f"{target} exists and is not empty; name a new folder")


def require_outside(target: Path, source: Path) -> None:
    """
    Raises:
        ConfigError: The target is the source or inside it.
    """
    refuse_collisions((), [NamedPath("TARGET", target)], [NamedPath("SOURCE", source)])


@contextmanager
def new_folder(target: Path, mode: int = 0o750) -> Iterator[Path]:
    """Yield a temporary folder, renamed to the target if the block succeeds and removed if not.

    Raises:
        StorageError: The target is not empty or cannot be written.
    """
    with partial_folder(target) as beside, _storage_errors(target):
        yield beside
        beside.chmod(mode)  # mkdtemp creates it for the owner only
        publish(beside, target)


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside the target, which is removed if it is still there at the end.

    Raises:
        StorageError: The target is not empty, or no folder can be created beside it.
    """
    refuse_taken(target)
    missing = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    try:
        with _storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_remains(target)
            beside, lock = _locked_folder(target)
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            os.close(lock)
    finally:
        with suppress(OSError):  # in use: not empty
            for folder in missing:
                folder.rmdir()


def publish(folder: Path, target: Path) -> None:
    """Flush a folder to the disk and rename it to the target.

    Raises:
        StorageError: It cannot be written.
    """
    with _storage_errors(target):
        for inner, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(inner, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(inner)
        folder.replace(target)
        sync_folder(target.parent)


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    """Report an OSError as one of the target."""
    try:
        yield
    except OSError as problem:
        raise StorageError(f"{target} cannot be written: {problem.strerror or problem}") from None


def _locked_folder(target: Path) -> tuple[Path, int]:
    """Create a temporary folder; return it and the descriptor that holds its lock.

    Another process may remove the folder before it is locked: then another one is created. A file
    system without locks has none.
    """
    while True:
        prefix = f".{target.name}."
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=target.parent))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_remains(target: Path) -> None:
    """Remove what killed processes have left of the same target."""
    name = re.compile(re.escape(f".{target.name}.") + r"\w{8}" + re.escape(_SUFFIX))
    for path in target.parent.iterdir():
        if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
