"""Detect outputs of a command that would overwrite its inputs or one another. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ascend_run.plugin_api.errors import ConfigError


class NamedPath(NamedTuple):
    """A file or folder that a command reads or writes."""

    name: str
    """Its name in messages: ``--tokenizer``, ``the record of --output-prefix``."""
    path: Path

    def __str__(self) -> str:
        return f"{self.name} ({self.path})"


def file_collisions(
    inputs: Iterable[NamedPath], outputs: Iterable[NamedPath], folders: Iterable[NamedPath] = ()
) -> list[str]:
    """Return a message for each output that would overwrite an input or another output.

    Files are compared by identity, not by spelling: relative paths, ``..``, symbolic links, hard
    links and mounts are resolved, even if the file does not exist yet.

    Args:
        inputs: Files that are read; they need not exist.
        outputs: Files or folders that will be written.
        folders: Folders that are read; no output may be one of them or be inside one.
    """
    read = {_identity(named.path): named for named in inputs}
    read_whole = {_identity(named.path): named for named in folders}
    written: dict[_Identity, NamedPath] = {}
    problems = []
    for output in outputs:
        own = _identity(output.path)
        first = written.setdefault(own, output)
        if own in read:
            problems.append(f"{output} would overwrite {read[own]}; name another output")
        elif first is not output:
            problems.append(f"{first} and {output} are the same file; name another for one of them")
        real = _real(output.path)
        around = [read_whole.get(_identity(path)) for path in (real, *real.parents)]
        problems += [
            f"{output} is inside {folder}, which is read; name a folder outside of it"
            for folder in around
            if folder is not None
        ]
    return problems


def refuse_collisions(
    inputs: Iterable[NamedPath], outputs: Iterable[NamedPath], folders: Iterable[NamedPath] = ()
) -> None:
    """Raise if an output would overwrite an input or another output. Call before writing.

    Raises:
        ConfigError: With everything that ``file_collisions`` returns.
    """
    if problems := file_collisions(inputs, outputs, folders):
        raise ConfigError("the output path cannot be used", problems)


_Identity = tuple[int | str, ...]


def _identity(path: Path) -> _Identity:
    """Device and inode of the nearest existing ancestor, and the path below it."""
    real = _real(path)
    for existing in (real, *real.parents):
        try:
            found = os.stat(existing)
        except (OSError, ValueError):  # missing, without permission, or not a valid name
            continue
        return (found.st_dev, found.st_ino, *real.relative_to(existing).parts)
    return real.parts


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # no file has a name with a zero byte
        return path.absolute()
