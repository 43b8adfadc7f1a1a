"""Make plugins discoverable for the duration of a test without installing them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def offered(*plugins: type[Any], group: str = "ascend_run.plugins") -> Iterator[None]:
    """Let discovery find these classes, in this process and on the ranks of the pool, which use its
    ``sys.path``.

    The classes get entry points in the metadata of a temporary distribution on ``sys.path``, so
    they are discovered like installed plugins.

    Args:
        plugins: Importable by name; each has a ``manifest``.
    """
    folder = Path(tempfile.mkdtemp(prefix="ascend-run-offered-"))
    metadata = folder / "ascend_run_offered-0.dist-info"
    metadata.mkdir()
    lines = [f"[{group}]"]
    for plugin in plugins:
        for name in (plugin.manifest.name, *plugin.manifest.aliases):
            lines.append(f"{name} = {plugin.__module__}:{plugin.__qualname__}")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ascend-run-offered\nVersion: 0\n"
    )
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        shutil.rmtree(folder)
