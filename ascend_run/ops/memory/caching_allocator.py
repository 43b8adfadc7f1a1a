"""A model of torch's caching allocator: the segments that it reserves for given allocations.

It has the rules of the allocator with its default settings, for one stream and a device whose
memory does not run out: sizes are rounded, small and large blocks have separate segments, the
smallest free block that fits is taken and split, and neighbours that are free are merged. Segments
are never given back. New segments have higher addresses, which decide between free blocks of one
size; on a device the driver chooses them.

Source: torch 2.13, c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import attrs

MIN_BLOCK: Final = 512
"""Sizes are rounded up to a multiple. kMinBlockSize."""
SMALL_SIZE: Final = 2**20
"""Largest block of a small segment. kSmallSize."""
SMALL_SEGMENT: Final = 2 * 2**20
"""kSmallBuffer."""
LARGE_SEGMENT: Final = 20 * 2**20
"""For blocks below ``MIN_LARGE``. large_segment_size."""
MIN_LARGE: Final = 10 * 2**20
"""Smallest block that has a segment of its own. kMinLargeAlloc."""
ROUND_LARGE: Final = 2 * 2**20
"""Segments of one block are rounded up to a multiple. kRoundLarge."""


@attrs.define(eq=False, repr=False)
class Block:
    """A range of a segment, which is allocated or free."""

    address: int
    nbytes: int
    owner: _FreeBlocks
    before: Block | None = None  #: In the same segment.
    after: Block | None = None  #: In the same segment.
    is_free: bool = False

    def split(self, nbytes: int) -> Block:
        """Keep this many bytes; return the rest as a block."""
        rest = Block(
            self.address + nbytes, self.nbytes - nbytes, self.owner, before=self, after=self.after
        )
        if self.after is not None:
            self.after.before = rest
        self.nbytes, self.after = nbytes, rest
        return rest

    def absorb_next(self) -> None:
        """Become one block with the one after this."""
        assert self.after is not None
        self.nbytes += self.after.nbytes
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class _FreeBlocks:
    """Free blocks of one kind in one pool, in the order in which they are taken."""

    def __init__(self, *, small: bool) -> None:
        self._small = small
        self._sizes: list[tuple[int, int]] = []  # and addresses, sorted
        self._blocks: dict[int, Block] = {}  # by address

    def take(self, nbytes: int) -> Block | None:
        """Remove the smallest block of at least as many bytes."""
        index = bisect_left(self._sizes, (nbytes, 0))
        if index == len(self._sizes):
            return None
        _, address = self._sizes.pop(index)
        return self._blocks.pop(address)

    def add(self, block: Block) -> None:
        block.is_free = True
        insort(self._sizes, (block.nbytes, block.address))
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self._sizes[bisect_left(self._sizes, (block.nbytes, block.address))]
        del self._blocks[block.address]

    def splits(self, rest: int) -> bool:
        """Return whether this many bytes that a block has too much become a free block."""
        return rest >= MIN_BLOCK if self._small else rest > SMALL_SIZE


class CachingAllocator:
    """The allocator of one device, with any number of pools."""

    def __init__(self) -> None:
        self.allocated = 0  #: By blocks, with what they have too much. Unit: bytes.
        self.reserved = 0  #: By segments. Unit: bytes.
        self.segments: list[Block] = []  #: The first block of each.
        self._free: dict[tuple[str, bool], _FreeBlocks] = {}

    def allocate(self, nbytes: int, pool: str = "") -> Block:
        """Allocate a block of a pool.

        Args:
            nbytes: At least 1.
        """
        size = _rounded(nbytes, MIN_BLOCK)
        small = size <= SMALL_SIZE
        free = self._free.setdefault((pool, small), _FreeBlocks(small=small))
        block = free.take(size) or self._reserve(size, free)
        block.is_free = False
        if free.splits(block.nbytes - size):
            free.add(block.split(size))
        self.allocated += block.nbytes
        return block

    def free(self, block: Block) -> None:
        """Free a block of :meth:`allocate`, which must not be used again."""
        assert not block.is_free
        self.allocated -= block.nbytes
        free = block.owner
        if block.after is not None and block.after.is_free:
            free.remove(block.after)
            block.absorb_next()
        if block.before is not None and block.before.is_free:
            block.is_free = True
            block = block.before
            free.remove(block)
            block.absorb_next()
        free.add(block)

    def _reserve(self, size: int, owner: _FreeBlocks) -> Block:
        if size <= SMALL_SIZE:
            nbytes = SMALL_SEGMENT
        elif size < MIN_LARGE:
            nbytes = LARGE_SEGMENT
        else:
            nbytes = _rounded(size, ROUND_LARGE)
        segment = Block(self.reserved, nbytes, owner)
        self.segments.append(segment)
        self.reserved += nbytes
        return segment


def _rounded(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
