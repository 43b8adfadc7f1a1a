"""What rank 0 tells the others arrives as it was."""

import pytest

from ascend_run.ops.generation.key_value_cache import CacheFull
from ascend_run.ops.generation.step import Chunk
from ascend_run.tools.generate.plan_message import (
    CacheChange,
    Change,
    Placed,
    Plan,
    RecordedCache,
)


def test_a_plan_comes_back_from_its_row() -> None:
    changes = [
        CacheChange(Change.NEW, num_tokens=64),
        CacheChange(Change.RESERVE, 3, 17),
        CacheChange(Change.FORGET, 2, 5),
        CacheChange(Change.GROW, 2, 40),
    ]
    placed = [
        Placed(Chunk(sequence=3, start=0, ids=[5, 6, 7], num_logits=0, length=9), 1),
        Placed(Chunk(sequence=2, start=8, ids=[1], num_logits=1), 0),
    ]
    for plan in (Plan(changes, placed), Plan([], placed[1:]), Plan(changes, [])):
        assert Plan.of_row(plan.as_row()) == plan


def test_only_what_changed_the_cache_is_told() -> None:
    cache = RecordedCache(64)
    cache.reserve(0, 20)
    cache.reserve(1, 5)
    with pytest.raises(CacheFull):
        cache.reserve(2, 33)
    cache.grow(1, 17)
    cache.release(0)
    cache.forget(1, 3)
    assert cache.changes[-1] == CacheChange(Change.FORGET, 1, 3)
    kinds = [change.kind for change in cache.changes if change.kind is not Change.FORGET]
    assert kinds == [
        *(Change.NEW, Change.RESERVE, Change.RESERVE),
        *(Change.GROW, Change.RELEASE),
    ]
