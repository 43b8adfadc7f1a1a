"""What torch's allocator does on the platform of the tests. The CPU has none: there a pool that
knows what is made within it, and a reference."""

from __future__ import annotations

import os
from typing import Final

import pytest

from ascend_run.ops.memory.caching_allocator import Block, CachingAllocator
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.ops.memory.plain_allocator import PlainAllocator, layout
from tests.ops.memory.random_traces import random_trace

from .device_allocator import DeviceAllocator
from .jobs import DEFAULT, NAME, placed

PLATFORM: Final = os.environ.get(PLATFORM_VARIABLE, "cpu")
VALUES: Final = {
    **DENSE,
    "model.hidden_size": 128,
    "model.vocab_size": 8192,
    "train.precision": "bf16",
    "platform": PLATFORM,
}
"""Embeddings of 2 MiB: tensors of this size are not in the segments of small ones."""


def reference_allocator() -> PlainAllocator | DeviceAllocator:
    return PlainAllocator() if PLATFORM == "cpu" else DeviceAllocator(PLATFORM)


def test_what_lasts_is_in_a_pool_of_its_own(gloo_pool: GlooPool) -> None:
    """On a GPU in segments of its own. It keeps every bit, and no step after the first one makes
    the pool grow."""
    plain, pooled = (gloo_pool.run(placed, 1, VALUES, names)[0] for names in ([], [NAME]))
    assert pooled.digests == plain.digests
    assert pooled.lasting_bytes == plain.lasting_bytes > 0
    assert plain.pools == plain.pools_of_outputs == pooled.pools_of_outputs == {DEFAULT}
    assert DEFAULT not in pooled.pools
    (pool,) = pooled.pools
    first, second = pooled.reserved
    assert first[pool] == second[pool] >= pooled.lasting_bytes


@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_has_the_blocks_of_the_allocator(seed: int) -> None:
    """In segments of any order: their addresses are the driver's."""
    allocator, reference = CachingAllocator(), reference_allocator()
    held: dict[int, Block] = {}
    for number, size, pool in random_trace(seed, ("", "other")):
        if size:
            held[number] = allocator.allocate(size, pool)
            reference.allocate(number, size, pool)
        else:
            allocator.free(held.pop(number))
            reference.free(number)
        assert sorted(layout(allocator)) == sorted(reference.layout)
