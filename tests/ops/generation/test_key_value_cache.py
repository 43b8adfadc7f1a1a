"""Pages against lists of tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.generation.key_value_cache import CacheFull, KeyValueCache
from ascend_run.ops.generation.step import StepPart

G, D, E, PAGE, PAGES, LAYERS = 2, 3, 5, 4, 9, 2
ACTION = st.tuples(st.sampled_from("raaaf"), st.integers(0, 4), st.integers(1, 13))


def poison(cache: KeyValueCache) -> None:
    """Fill what no sequence owns with NaN."""
    owned = torch.zeros(PAGES * PAGE, dtype=torch.bool)
    for start, end in cache._runs.values():
        owned[start * PAGE : end * PAGE] = True
    for pool in cache._pools.values():
        pool.k_GPD[:, ~owned] = math.nan
        pool.v_GPE[:, ~owned] = math.nan


@given(st.lists(ACTION, max_size=40))
def test_a_sequence_reads_its_own_tokens_in_order(actions: list[tuple[str, int, int]]) -> None:
    cache = KeyValueCache(PAGES * PAGE - 1, PAGE)
    generator = torch.Generator().manual_seed(0)
    reserved: dict[int, int] = {}
    stored: dict[int, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for action, sequence, count in actions:
        if action == "r" and sequence not in reserved:
            try:
                cache.reserve(sequence, count)
            except CacheFull:
                continue
            reserved[sequence], stored[sequence] = count, [[] for _ in range(LAYERS)]
        elif action == "f" and sequence in reserved:
            cache.release(sequence)
            del reserved[sequence], stored[sequence]
            poison(cache)
        elif action == "a" and sequence in reserved:
            start = sum(len(k) for k, _ in stored[sequence][0])
            count = min(count, reserved[sequence] - start)
            if count == 0:
                continue
            for layer in range(LAYERS):
                k = torch.randn(count, G, D, generator=generator)
                v = torch.randn(count, G, E, generator=generator)
                stored[sequence][layer].append((k, v))
                keys, values = cache.append(layer, StepPart(sequence, start, 0, count), k, v)
                assert torch.equal(keys, torch.cat([k for k, _ in stored[sequence][layer]]))
                assert torch.equal(values, torch.cat([v for _, v in stored[sequence][layer]]))
        pages = sum(-(-tokens // PAGE) for tokens in reserved.values())
        assert cache.free_tokens == (PAGES - pages) * PAGE
        written = len(cache._pools)
        assert cache.num_bytes == pages * PAGE * written * G * (D + E) * 4


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    cache = KeyValueCache(40, 4)
    for sequence in range(5):
        cache.reserve(sequence, 8)
    for sequence in (3, 1, 2):  # together six adjacent pages, freed in another order
        cache.release(sequence)
    cache.reserve(7, 24)
    assert cache._runs[7] == (2, 8)


def test_the_message_has_the_tokens_asked_for_and_those_free() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 30)
    with pytest.raises(CacheFull, match=r"9 tokens need 3 adjacent .* of 40 tokens 8 are free"):
        cache.reserve(1, 9)


@pytest.mark.parametrize(("start", "count"), [(1, 1), (0, 9)], ids=["gap", "too-many"])
def test_tokens_that_do_not_follow_the_stored_are_refused(start: int, count: int) -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 8)
    part = StepPart(0, start, 0, count)
    with pytest.raises(ValueError, match="do not follow the 0 stored ones within the 8"):
        cache.append(0, part, torch.zeros(count, G, D), torch.zeros(count, G, E))


def test_a_sequence_has_pages_once() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 8)
    with pytest.raises(ValueError, match="pages already"):
        cache.reserve(0, 8)
