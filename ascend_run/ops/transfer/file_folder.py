"""Folders of files that take the place of memory of the host. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Final

_IN_MEMORY: Final = ("tmpfs", "ramfs")
"""File systems whose files take memory."""


def problems_of_folder(plugin: str, folder: str | None, platform: str) -> Iterator[str]:
    """Yield why the ``folder`` of a plugin's options, if it is given, cannot be used.

    A file is created there, which has no name and is deleted at once.
    """
    if folder is None:
        return
    given = f"{plugin}: plugins.{plugin}.folder={folder}"
    if platform != "cpu":
        yield f"{given} is for platform cpu, not {platform}; leave it out"
    elif not os.path.isdir(folder):
        yield f"{given} is not an existing folder; create it, or name another one"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            yield (
                f"{given}: no file can be created in it ({error.strerror}); name a folder on a "
                "disk that you may write to"
            )


def why_nothing_is_saved(platform: str, option: str = "", folder: str | None = None) -> str:
    """Return why what leaves the device takes as much of its memory elsewhere; empty if it takes
    other memory.

    Args:
        option: That of the folder, such as ``plugins.swap-attention.folder``; empty: there is none.
    """
    if platform != "cpu":
        return ""
    if folder is None:
        way_out = f"; set {option} to a folder on a disk" if option else ""
        return f"no memory is saved, since the host's is the device's on platform cpu{way_out}"
    kind = _file_system(folder)
    if kind not in _IN_MEMORY:
        return ""
    return (
        f"no memory is saved, since the files of {option}={folder} are in memory ({kind}); name a "
        "folder on a disk"
    )


def _file_system(folder: str) -> str:
    """Return the type of the file system of a folder, such as ``ext4``; empty if it is unknown."""
    import psutil

    path = os.path.realpath(folder)
    mounts = [
        (len(mount.mountpoint), order, mount.fstype)
        for order, mount in enumerate(psutil.disk_partitions(all=True))
        if os.path.commonpath((mount.mountpoint, path)) == mount.mountpoint
    ]
    return max(mounts)[2] if mounts else ""
