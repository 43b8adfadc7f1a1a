"""Folders of files that take the place of memory of the host. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator


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
