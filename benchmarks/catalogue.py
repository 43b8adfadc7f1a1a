"""Every row that there is, in the order of the table."""

from __future__ import annotations

import fnmatch

from . import end_to_end, listeners, start_up
from .protocol import Benchmark


def all_benchmarks() -> list[Benchmark]:
    return [*end_to_end.benchmarks(), *listeners.benchmarks(), *start_up.benchmarks()]


def matching(pattern: str) -> list[Benchmark]:
    """Those with the pattern (``*`` and ``?`` as in file names) somewhere in their name."""
    wanted = f"*{pattern.lower()}*"
    return [b for b in all_benchmarks() if fnmatch.fnmatchcase(b.name.lower(), wanted)]
