"""Boxes against a plain count of elements."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.core.checkpoint.boxes import Box, boxes_of_range, tiling_problem, whole

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(flat_ranges())
def test_the_boxes_of_a_flat_range_hold_its_elements_in_order(
    drawn: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = drawn
    everything = torch.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [everything[box.slices_in(whole(shape))].reshape(-1) for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == [*range(start, stop)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_two_boxes_share_what_counting_says(data: st.DataObject) -> None:
    shape = data.draw(shapes)

    def box() -> Box:
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    one, other = box(), box()
    count = torch.zeros(shape, dtype=torch.int64)
    for each in (one, other):
        count[each.slices_in(whole(shape))] += 1
    shared = one.intersect(other)
    assert (shared.volume if shared else 0) == int((count == 2).sum())
    if shared:
        assert bool((count[shared.slices_in(whole(shape))] == 2).all())


@given(st.data())
def test_a_tiling_is_distinguished_from_gaps_overlaps_and_strays(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    cuts = sorted(data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=4)))
    edges = [0, *cuts, math.prod(shape)]
    boxes = [b for a, z in itertools.pairwise(edges) for b in boxes_of_range(shape, a, z)]
    boxes = data.draw(st.permutations(boxes))
    assert tiling_problem(shape, boxes) is None
    victim = data.draw(st.integers(0, len(boxes) - 1))
    assert "written by no rank" in str(tiling_problem(shape, boxes[:victim] + boxes[victim + 1 :]))
    assert "overlaps" in str(tiling_problem(shape, [*boxes, boxes[victim]]))
    if shape:
        stray = Box((shape[0], *boxes[victim].offset[1:]), boxes[victim].shape)
        assert "out of bounds" in str(tiling_problem(shape, [*boxes, stray]))


def test_an_empty_tensor_is_tiled_by_one_empty_shard_and_not_by_none() -> None:
    assert tiling_problem((0, 3), [Box((0, 0), (0, 3))]) is None
    assert tiling_problem((0, 3), []) is not None


def test_a_shard_with_other_axes_is_named() -> None:
    assert "wrong number of axes" in str(tiling_problem((2, 2), [Box((0,), (4,))]))
