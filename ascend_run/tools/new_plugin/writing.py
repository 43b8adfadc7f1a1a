"""Write a folder of files atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ascend_run.plugin_api import StorageError


def folder_problems(target: Path) -> list[str]:
    """Return messages why a new package cannot be written there."""
    way = "name another with --folder"
    try:
        if target.is_dir():
            if names := sorted(entry.name for entry in target.iterdir()):
                return [f"the folder {target} is not empty: it has {names[0]}; {way}"]
        elif os.path.lexists(target):
            return [f"{target} exists and is not a folder; {way}"]
    except OSError as error:
        return [f"the folder {target} cannot be read: {error.strerror or error}; {way}"]
    return []


def write_package(target: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write the files into a folder that is missing or empty.

    They are written to a hidden folder first and then moved, so that a failure leaves nothing
    behind.

    Raises:
        StorageError: The files cannot be written.
    """
    made: list[Path] = []
    written: list[Path] = []
    try:
        _make_folder(target, made)
        stage = Path(tempfile.mkdtemp(prefix=".new-plugin-", dir=target))
        written.append(stage)
        for place, text in files.items():
            path = stage / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for entry in sorted(stage.iterdir()):
            written.append(target / entry.name)
            entry.rename(target / entry.name)
        stage.rmdir()
    except BaseException as error:
        for path in written:
            _remove(path)
        for folder in reversed(made):
            with suppress(OSError):  # files of others are left in place
                folder.rmdir()
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {target}",
                [f"{error.strerror or error}; name another folder with --folder"],
            ) from error
        raise


def _make_folder(target: Path, made: list[Path]) -> None:
    """Create the folder and its parents, and append each new one to ``made``."""
    missing = [path for path in (target, *target.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        made.append(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
