"""What is wrong with one file: the first problems, and how many more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

SHOWN_PROBLEMS: Final = 20
"""Problems reported per file; the others are counted."""


@attrs.define
class Problems:
    """Collects the problems of one file."""

    path: Path
    shown: list[str] = attrs.field(factory=list, init=False)
    more: int = attrs.field(default=0, init=False)

    def add(self, problem: str, row: int | None = None) -> None:
        """Add a problem of the file, or of one of its lines or rows (from 1)."""
        if row is None:
            self.shown.append(f"{self.path} {problem}")
        elif len(self.shown) < SHOWN_PROBLEMS:
            self.shown.append(f"{self.path}:{row}: {problem}")
        else:
            self.more += 1

    def __bool__(self) -> bool:
        return bool(self.shown)

    def __iter__(self) -> Iterator[str]:
        yield from self.shown
        if self.more:
            yield f"{self.path}: {self.more} more lines cannot be used"
