"""Progress of a verification on stderr. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verifier import Report


@contextmanager
def progress() -> Iterator[Report]:
    """Yield a callback that shows each stage: in a bar on a terminal, else one line per stage."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True
    ) as bar:
        task = bar.add_task("verify", total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield report


class _Lines:
    """Prints a line at the start of each stage, with the seconds since the first one's."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        seconds = time.monotonic() - self._begin
        print(f"verify: {seconds:6.1f} s, {done}/{total}: {stage}", file=sys.stderr, flush=True)
