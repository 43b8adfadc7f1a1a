"""torch's caching allocator once more, by looking at every block each time: a reference."""

from __future__ import annotations

from typing import Any, TypeAlias

from ascend_run.ops.memory.caching_allocator import CachingAllocator

Layout: TypeAlias = list[list[tuple[int, bool]]]
"""Size of each block and whether it is free, by segment."""
UNIT = 512
MIB = 2**20


class PlainAllocator:
    """Segments as lists of ``[size, holder]``, where the holder of what is free is None."""

    def __init__(self) -> None:
        self.segments: list[tuple[str, bool, list[list[Any]]]] = []

    def allocate(self, holder: object, nbytes: int, pool: str) -> None:
        size = (nbytes + UNIT - 1) // UNIT * UNIT
        small = size <= MIB
        fitting = [
            (part[0], segment, place)
            for segment, (its_pool, its_small, parts) in enumerate(self.segments)
            for place, part in enumerate(parts)
            if (its_pool, its_small) == (pool, small) and part[1] is None and part[0] >= size
        ]
        if not fitting:
            whole = 2 * MIB if small else 20 * MIB
            if size >= 10 * MIB:
                whole = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((pool, small, [[whole, None]]))
            fitting = [(whole, len(self.segments) - 1, 0)]
        found, segment, place = min(fitting)
        rest = found - size
        parts = self.segments[segment][2]
        if (small and rest > 0) or rest > MIB:
            parts[place : place + 1] = [[size, holder], [rest, None]]
        else:
            parts[place][1] = holder

    def free(self, holder: object) -> None:
        for _, _, parts in self.segments:
            for part in parts:
                if part[1] == holder:
                    part[1] = None
            merged: list[list[Any]] = []
            for size, its_holder in parts:
                if merged and its_holder is None is merged[-1][1]:
                    merged[-1][0] += size
                else:
                    merged.append([size, its_holder])
            parts[:] = merged

    @property
    def allocated(self) -> int:
        return sum(s for _, _, parts in self.segments for s, holder in parts if holder is not None)

    @property
    def layout(self) -> Layout:
        return [[(size, h is None) for size, h in parts] for _, _, parts in self.segments]


def layout(allocator: CachingAllocator) -> Layout:
    """The same of the model; its blocks must lie side by side."""
    found = []
    for first in allocator.segments:
        blocks, block = [first], first
        while block.after is not None:
            assert block.after.address == block.address + block.nbytes
            assert block.after.before is block
            block = block.after
            blocks.append(block)
        found.append([(b.nbytes, b.is_free) for b in blocks])
    return found
