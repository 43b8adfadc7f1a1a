"""Files of the run folder that panels of plugins show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_run.tools.pages.run_folder import RunData


def panel_file(run: RunData, name: str | None) -> Iterator[Path]:
    """Yield the path of a panel's file, if it names one in the run folder itself."""
    if name is not None and Path(name).name == name:
        yield run.path / name


def objects_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # nothing was recorded yet
        return
    for line in text.split("\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue  # truncated by a killed rank
        if isinstance(found, dict):
            yield found
