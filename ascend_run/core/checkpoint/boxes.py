"""Boxes of a global tensor: intersection, slicing and tiling of shards.

Torch-free. A 0-dim tensor is one box of volume 1; a box with an empty axis has volume 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Box:
    """``offset[a] <= index[a] < offset[a] + shape[a]`` for every axis ``a``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection, in global coordinates, or None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(length > 0 for length in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds ``outer``."""
        starts = (mine - its for mine, its in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split the flat range ``start <= i < stop`` of a row-major tensor into boxes.

    Returns:
        At most ``2 * axes - 1`` boxes in flat order, each contiguous in the range.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first_row, first_column = divmod(start, inner)
    last_row, last_column = divmod(stop, inner)

    def part_of_row(row: int, begin: int, end: int) -> list[Box]:
        parts = boxes_of_range(shape[1:], begin, end)
        return [Box((row, *part.offset), (1, *part.shape)) for part in parts]

    if first_row == last_row:
        return part_of_row(first_row, first_column, last_column)
    boxes: list[Box] = []
    if first_column:
        boxes += part_of_row(first_row, first_column, inner)
        first_row += 1
    if last_row > first_row:
        offset = (first_row,) + (0,) * (len(shape) - 1)
        boxes.append(Box(offset, (last_row - first_row, *shape[1:])))
    return boxes + part_of_row(last_row, 0, last_column)


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why ``boxes`` do not cover a tensor exactly once, or None if they do."""
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            where = f"the shard of shape {list(box.shape)} at {list(box.offset)}"
            return f"{where} has the wrong number of axes"
        axes = zip(box.offset, box.shape, shape, strict=True)
        if any(start < 0 or n < 0 or start + n > size for start, n, size in axes):
            return f"the shard of shape {list(box.shape)} at {list(box.offset)} is out of bounds"
    if (pair := _overlap(shape, boxes)) is not None:
        one, other = pair
        return (
            f"the shard of shape {list(one.shape)} at {list(one.offset)} overlaps "
            f"the one of shape {list(other.shape)} at {list(other.offset)}"
        )
    covered, needed = sum(box.volume for box in boxes), math.prod(shape)
    if covered != needed or not boxes:
        return f"{needed - covered} of {needed} elements are written by no rank"
    return None


def _overlap(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two overlapping boxes by a sweep along the axis with the most distinct offsets."""
    solid = [box for box in boxes if box.volume]
    cuts = [len({box.offset[axis] for box in solid}) for axis in range(len(shape))]
    axis = cuts.index(max(cuts)) if cuts else None
    if axis is None:
        return (solid[0], solid[1]) if len(solid) > 1 else None
    active: list[Box] = []
    for box in sorted(solid, key=lambda box: box.offset[axis]):
        active = [a for a in active if a.offset[axis] + a.shape[axis] > box.offset[axis]]
        for earlier in active:
            if earlier.intersect(box) is not None:
                return earlier, box
        active.append(box)
    return None
