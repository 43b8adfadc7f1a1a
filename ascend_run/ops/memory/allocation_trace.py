"""A record of what was allocated and freed, and what an allocator reserves for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import attrs

from .caching_allocator import Block, CachingAllocator

LONG_LIVED: Final = "long-lived"


class Allocation(NamedTuple):
    """A storage that was allocated, resized or freed."""

    storage: int  #: Its number.
    nbytes: int  #: From now on; 0 if it was freed.
    long_lived: bool = False  #: Whether that was in a phase whose tensors stay.


@attrs.frozen
class Usage:
    """The highest use of memory. Unit: bytes."""

    allocated: int
    reserved: int

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that never was allocated at once, from 0 to 1."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def replay(trace: Iterable[Allocation], *, separate: bool) -> Usage:
    """Return what torch's caching allocator reserves.

    Args:
        separate: Give what is long-lived a pool of its own.
    """
    allocator, blocks, allocated = CachingAllocator(), dict[int, Block](), 0
    for change in trace:
        before = blocks.pop(change.storage, None)
        if change.nbytes:
            pool = LONG_LIVED if separate and change.long_lived else ""
            blocks[change.storage] = allocator.allocate(change.nbytes, pool)
            allocated = max(allocated, allocator.allocated)
        if before is not None:  # a storage is resized by a copy
            allocator.free(before)
    return Usage(allocated, allocator.reserved)
