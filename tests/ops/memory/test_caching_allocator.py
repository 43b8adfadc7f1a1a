"""The model of torch's allocator: by hand, and against another one that looks at every block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ascend_run.ops.memory import caching_allocator as model
from ascend_run.ops.memory.allocation_trace import Allocation, Usage, replay
from ascend_run.ops.memory.caching_allocator import Block, CachingAllocator

from .plain_allocator import PlainAllocator, layout
from .random_traces import KIB, MIB, random_trace

LARGE = 20 * MIB


def test_constants_are_those_of_torch() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    found = dict(
        re.findall(r"\b(k\w+|large_segment_size_)(?: = |\{)(\d+)", header.read_text("utf-8"))
    )
    assert {name: int(value) for name, value in found.items()}.items() >= {
        "kMinBlockSize": model.MIN_BLOCK,
        "kSmallSize": model.SMALL_SIZE,
        "kSmallBuffer": model.SMALL_SEGMENT,
        "large_segment_size_": model.LARGE_SEGMENT,
        "kMinLargeAlloc": model.MIN_LARGE,
        "kRoundLarge": model.ROUND_LARGE,
    }.items()


@pytest.mark.parametrize(
    ("nbytes", "blocks"),
    [
        (1, [(512, False), (2 * MIB - 512, True)]),
        (513, [(1024, False), (2 * MIB - 1024, True)]),
        (MIB, [(MIB, False), (MIB, True)]),
        (MIB + 1, [(MIB + 512, False), (LARGE - MIB - 512, True)]),
        (10 * MIB - 512, [(10 * MIB - 512, False), (10 * MIB + 512, True)]),
        (10 * MIB, [(10 * MIB, False)]),
        (10 * MIB + 1, [(10 * MIB + 512, False), (2 * MIB - 512, True)]),
        (11 * MIB, [(12 * MIB, False)]),
    ],
)
def test_a_first_block(nbytes: int, blocks: list[tuple[int, bool]]) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert layout(allocator) == [blocks]
    assert allocator.reserved == sum(size for size, _ in blocks)
    assert allocator.allocated == blocks[0][0]


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(size * MIB) for size in (40, 14, 12, 14)]:
        allocator.free(block)
    assert allocator.allocate(13 * MIB).address == 40 * MIB  # the first of both with 14 MiB
    assert allocator.allocate(12 * MIB + 1).address == 66 * MIB
    assert allocator.allocate(30 * MIB).address == 0
    assert allocator.allocate(9 * MIB + 1).address == 30 * MIB  # what was split off
    assert allocator.reserved == 80 * MIB


def test_neighbours_that_are_free_become_one_block() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(4 * MIB) for _ in range(3))
    rest = (8 * MIB, True)
    assert layout(allocator) == [[(4 * MIB, False)] * 3 + [rest]]
    allocator.free(first)
    assert layout(allocator) == [[(4 * MIB, True), *[(4 * MIB, False)] * 2, rest]]
    allocator.free(third)
    assert layout(allocator) == [[(4 * MIB, True), (4 * MIB, False), (12 * MIB, True)]]
    allocator.free(second)
    assert layout(allocator) == [[(LARGE, True)]]
    assert (allocator.allocated, allocator.reserved) == (0, LARGE)


def test_pools_share_no_segment() -> None:
    allocator = CachingAllocator()
    for pool in ("", "other", "", "other"):
        allocator.allocate(4 * MIB, pool)
        allocator.allocate(4 * KIB, pool)
    assert allocator.reserved == 2 * (LARGE + 2 * MIB)


@pytest.mark.parametrize("pools", [("",), ("", "other")], ids=["one pool", "two pools"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traces_are_those_of_the_reference(seed: int, pools: tuple[str, ...]) -> None:
    allocator, reference = CachingAllocator(), PlainAllocator()
    held: dict[int, Block] = {}
    for number, size, pool in random_trace(seed, pools):
        if size:
            held[number] = allocator.allocate(size, pool)
            reference.allocate(number, size, pool)
        else:
            allocator.free(held.pop(number))
            reference.free(number)
        assert layout(allocator) == reference.layout
        assert allocator.allocated == reference.allocated <= allocator.reserved
        _check_apart([*held.values()])
    for block in held.values():
        allocator.free(block)
    assert all(len(blocks) == 1 and blocks[0][1] for blocks in layout(allocator))
    assert allocator.allocated == 0


def _check_apart(blocks: list[Block]) -> None:
    """No two blocks overlap, and none is also free."""
    ends = 0
    for block in sorted(blocks, key=lambda block: block.address):
        assert block.address >= ends
        assert not block.is_free
        ends = block.address + block.nbytes


def test_states_in_freed_activations_are_what_fragments() -> None:
    """Each state of 14 MiB leaves 10 of a free block of 24 MiB, in which no activation fits."""
    activations = [(number, 24 * MIB, False) for number in range(4)]
    states = [(number, 14 * MIB, True) for number in range(4, 8)]
    freed = [(number, 0, False) for number, _, _ in activations]
    step = [*activations, *freed, *states, *activations, *freed, *activations]
    trace = [Allocation(*row) for row in step]
    needed = 4 * (24 + 14) * MIB
    one, two = (replay(trace, separate=separate) for separate in (False, True))
    assert one == Usage(allocated=needed, reserved=8 * 24 * MIB)
    assert two == Usage(allocated=needed, reserved=needed)
    assert (one.fragmentation, two.fragmentation) == (1 - 38 / 48, 0.0)


def test_a_storage_is_resized_by_a_copy() -> None:
    trace = [Allocation(1, 4 * MIB), Allocation(1, 6 * MIB), Allocation(1, 0)]
    assert replay(trace, separate=False) == Usage(allocated=10 * MIB, reserved=LARGE)
    assert replay([], separate=True) == Usage(allocated=0, reserved=0)
    assert replay([], separate=True).fragmentation == 0.0
