"""A fake clock: tests that wait on the real clock depend on the machine."""

from __future__ import annotations


class Clock:
    """Time that only advances when told to. Unit: seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now
