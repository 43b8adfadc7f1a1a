"""Blocks of a float32 product that is computed in a new tensor and copied to where it belongs. No
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

BLOCK_BYTES: Final = 2 * 2**20
"""Of a block: what a core's caches hold."""
NARROWEST: Final = 256
"""Rows or columns of a block, at least: the other operand is reordered for each block."""
_ITEM: Final = 4


def blocks(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of each block: some of the columns, or of the rows if there are
    more of them."""
    everything = slice(None)
    size = _size(num_rows, num_columns)
    for start in range(0, max(num_rows, num_columns), size):
        block = slice(start, start + size)
        yield (block, everything) if num_rows > num_columns else (everything, block)


def block_bytes(num_rows: int, num_columns: int) -> int:
    """Return the bytes of the largest block."""
    wide = min(_size(num_rows, num_columns), max(num_rows, num_columns))
    return _ITEM * wide * min(num_rows, num_columns)


def _size(num_rows: int, num_columns: int) -> int:
    narrow = max(1, min(num_rows, num_columns))
    return max(NARROWEST, BLOCK_BYTES // (_ITEM * narrow))
