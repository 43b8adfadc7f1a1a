"""Checkpoint folders on a file system: hidden while written, published by one rename.

``step_00000100/`` is a published checkpoint. ``.step_00000100.tmp-<nonce>/`` is being written or
removed; ``.step_00000100.old-<nonce>/`` is being replaced by a newer save of the same step.
Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from typing import Final

from ascend_run.core.files import sync_folder
from ascend_run.plugin_api.errors import StorageError

_PUBLISHED: Final = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_HIDDEN: Final = re.compile(r"\.(step_\d{8,})\.(tmp|old)-[0-9a-f]+")


def step_path(folder: str, step: int) -> str:
    """Return the path of a published checkpoint."""
    return os.path.join(folder, f"step_{step:08d}")


def hidden_path(folder: str, step: int, nonce: str) -> str:
    """Return the path of a checkpoint that is being written."""
    return os.path.join(folder, f".step_{step:08d}.tmp-{nonce}")


def published(folder: str) -> dict[int, str]:
    """Map each published step to its path, oldest first, without an integrity check.

    A checkpoint that a crashed run was replacing counts as published, under its temporary name.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    visible = {name: name for name in names if _PUBLISHED.fullmatch(name)}
    for name in sorted(names):
        if (match := _HIDDEN.fullmatch(name)) and match[2] == "old":
            visible.setdefault(match[1], name)
    steps = {int(visible_name[len("step_") :]): name for visible_name, name in visible.items()}
    return {step: os.path.join(folder, steps[step]) for step in sorted(steps)}


def make_root(folder: str) -> None:
    """Create the folder of checkpoints durably, if it does not exist."""
    if os.path.isdir(folder):
        return
    os.makedirs(folder, exist_ok=True)
    sync_folder(os.path.dirname(os.path.abspath(folder)))


def publish(folder: str, hidden: str, step: int, nonce: str) -> str:
    """Rename a finished checkpoint to its final name, replacing one of the same step.

    At any time either the old or the new one exists under a name that ``published`` finds.
    """
    final = step_path(folder, step)
    replaced = os.path.join(folder, f".step_{step:08d}.old-{nonce}")
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(hidden, final)
    sync_folder(folder)
    _remove(replaced)
    return final


def retire(folder: str, path: str, nonce: str) -> None:
    """Remove a published checkpoint: rename it first, then delete its files."""
    hidden = os.path.join(folder, f".{os.path.basename(path)}.tmp-{nonce}")
    os.rename(path, hidden)
    sync_folder(folder)
    _remove(hidden)


def clear_leftovers(folder: str) -> None:
    """Clean up after a crashed run: remove partial checkpoints, restore replaced ones."""
    for name in sorted(os.listdir(folder)):
        match = _HIDDEN.fullmatch(name)
        if match is None:
            continue
        path, final = os.path.join(folder, name), os.path.join(folder, match[1])
        if match[2] == "old" and not os.path.lexists(final):
            os.rename(path, final)
            sync_folder(folder)
        else:
            _remove(path)


def _remove(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


@contextlib.contextmanager
def storage_errors(path: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the operation, the path and the reason.

    Args:
        path: What is being written, for errors that do not name a file.
        needed_bytes: Size of the whole write, for the error message.
    """
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "OSError")
        where = error.filename if isinstance(error.filename, str) else path
        problem = f"{where}: {error.strerror or error} ({code})"
        if needed_bytes is not None:
            problem += f"; {needed_bytes} bytes needed, {free_text(path)}"
        raise StorageError("the file system refused", [problem]) from error


def free_bytes(path: str) -> int | None:
    """Return the free space at ``path``, which need not exist yet, or None if unknown."""
    probe = os.path.abspath(path)
    while not os.path.lexists(probe):
        probe = os.path.dirname(probe)
    try:
        status = os.statvfs(probe)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def free_text(path: str) -> str:
    """Return ``free_bytes`` as text."""
    free = free_bytes(path)
    return "free space unknown" if free is None else f"{free} bytes free"
