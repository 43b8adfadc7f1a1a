"""Pages against lists of tokens."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.generation.key_value_cache import CacheFull, KeyValueCache
from ascend_run.ops.generation.step import Chunk, Step, StepPart

G, D, E, PAGE, PAGES, LAYERS = 2, 3, 5, 4, 9, 2
ACTION = st.tuples(st.sampled_from("raaakfgt"), st.integers(0, 4), st.integers(1, 13))


def poison(cache: KeyValueCache) -> None:
    """Fill what no sequence owns with NaN."""
    owned = torch.zeros(cache.num_pages * PAGE, dtype=torch.bool)
    for sequence in cache.pages._runs:
        for low, high in cache.pages.tokens(sequence, 0, cache.pages.num_tokens(sequence)):
            owned[low:high] = True
    for pool in cache._pools.values():
        pool.k_GPD[:, ~owned] = math.nan
        pool.v_GPE[:, ~owned] = math.nan


@given(st.lists(ACTION, max_size=40))
def test_a_sequence_reads_its_own_tokens_in_order(actions: list[tuple[str, int, int]]) -> None:
    check(actions)


def test_a_sequence_reads_its_own_tokens_after_many_actions() -> None:
    draw = random.Random(0)
    check([(draw.choice("raaakfgt"), draw.randrange(5), draw.randint(1, 13)) for _ in range(600)])


def check(actions: list[tuple[str, int, int]]) -> None:
    """Compare with tensors of each sequence, and with its pages as objects, which a sequence has
    in part from the one that it began with."""
    cache = KeyValueCache(PAGES * PAGE - 1, PAGE)
    generator = torch.Generator().manual_seed(0)
    pages: dict[int, list[object]] = {}
    stored: dict[int, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for action, sequence, count in actions:
        if action == "r" and sequence not in pages:
            try:
                cache.reserve(sequence, count)
            except CacheFull:
                continue
            pages[sequence] = [object() for _ in range(-(-count // PAGE))]
            stored[sequence] = [[] for _ in range(LAYERS)]
        elif action == "k" and sequence in pages and (child := count % 5) not in pages:
            full = sum(len(k) for k, _ in stored[sequence][0]) // PAGE
            try:
                cache.fork(sequence, child)
            except CacheFull:
                assert cache.free_tokens < (len(pages[sequence]) - full) * PAGE
                continue
            own = [object() for _ in pages[sequence][full:]]
            pages[child] = [*pages[sequence][:full], *own]
            stored[child] = [[*layer] for layer in stored[sequence]]
        elif action == "g" and sequence in pages:
            missing = -(-2 * count // PAGE) - len(pages[sequence])
            if missing * PAGE > cache.free_tokens:
                with pytest.raises(CacheFull):
                    cache.grow(sequence, 2 * count)
                continue
            cache.grow(sequence, 2 * count)
            pages[sequence] += [object() for _ in range(missing)]
        elif action == "t" and sequence in pages:
            others = [owned for name, owned in pages.items() if name != sequence]
            if {*pages[sequence]} & {page for owned in others for page in owned}:
                continue  # a fork reads them
            cache.forget(sequence, count)
            stored[sequence] = [first(layer, count) for layer in stored[sequence]]
        elif action == "f" and sequence in pages:
            cache.release(sequence)
            del pages[sequence], stored[sequence]
            poison(cache)
        elif action == "a" and sequence in pages:
            start = sum(len(k) for k, _ in stored[sequence][0])
            count = min(count, len(pages[sequence]) * PAGE - start)
            if count == 0:
                continue
            for layer in range(LAYERS):
                k = torch.randn(count, G, D, generator=generator)
                v = torch.randn(count, G, E, generator=generator)
                stored[sequence][layer].append((k, v))
                keys, values = cache.append(layer, StepPart(sequence, start, 0, count), k, v)
                assert torch.equal(keys, torch.cat([k for k, _ in stored[sequence][layer]]))
                assert torch.equal(values, torch.cat([v for _, v in stored[sequence][layer]]))
        used = len({page for owned in pages.values() for page in owned})
        assert cache.free_tokens == (PAGES - used) * PAGE
        written = len(cache._pools)
        assert cache.num_bytes == used * PAGE * written * G * (D + E) * 4


def first(
    layer: list[tuple[torch.Tensor, torch.Tensor]], count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first tokens of those that were stored one after the other."""
    if not layer:
        return []
    k, v = (torch.cat(held)[:count] for held in zip(*layer, strict=True))
    return [(k, v)]


@pytest.mark.parametrize("num_stored", [0, 3, 4, 6, 8])
def test_a_fork_shares_full_pages_and_copies_the_last_tokens(num_stored: int) -> None:
    cache = KeyValueCache(60, PAGE)
    k, v = torch.randn(13, G, D), torch.randn(13, G, E)
    cache.reserve(0, 13)
    if num_stored:
        cache.append(0, StepPart(0, 0, 0, num_stored), k[:num_stored], v[:num_stored])
    poison(cache)
    cache.fork(0, 1)
    shared = num_stored // PAGE
    assert cache.free_tokens == 60 - (4 + 4 - shared) * PAGE
    for sequence in (1, 0):  # each goes on by itself
        part = StepPart(sequence, num_stored, 0, 13 - num_stored)
        new = k[num_stored:] + sequence, v[num_stored:] + sequence
        keys, values = cache.append(0, part, *new)
        assert torch.equal(keys, torch.cat([k[:num_stored], new[0]]))
        assert torch.equal(values, torch.cat([v[:num_stored], new[1]]))
    cache.release(0)
    assert cache.free_tokens == 60 - 4 * PAGE
    cache.release(1)
    assert cache.free_tokens == 60
    assert cache.pages._free == [(0, 15)]


def test_a_fork_may_have_more_or_fewer_pages_than_the_other() -> None:
    cache = KeyValueCache(60, PAGE)
    cache.reserve(0, 13)
    k, v = torch.randn(6, G, D), torch.randn(6, G, E)
    cache.append(0, StepPart(0, 0, 0, 6), k, v)
    for child, num_tokens in ((1, 30), (2, 7)):
        free = cache.free_tokens
        cache.fork(0, child, num_tokens)
        pages = -(-num_tokens // PAGE)
        assert cache.pages.num_tokens(child) == pages * PAGE
        assert cache.free_tokens == free - (pages - 6 // PAGE) * PAGE
        keys, _ = cache.append(0, StepPart(child, 6, 0, 1), k[:1], v[:1])
        assert torch.equal(keys, torch.cat([k, k[:1]]))


def test_pages_that_are_not_adjacent_serve_when_no_run_is_long_enough() -> None:
    cache = KeyValueCache(40, 4)
    for sequence in range(5):
        cache.reserve(sequence, 8)
    cache.release(1)
    cache.release(3)
    cache.reserve(7, 14)
    assert cache.pages._runs[7] == [(2, 4), (6, 8)]
    assert cache.pages.tokens(7, 0, 13) == [(8, 16), (24, 29)]
    assert cache.pages.tokens(7, 7, 9) == [(15, 16), (24, 25)]
    k, v = torch.randn(13, G, D), torch.randn(13, G, E)
    for start, end in ((0, 6), (6, 7), (7, 13)):  # the second range begins at 8
        part = StepPart(7, start, 0, end - start)
        got = cache.append(0, part, k[start:end], v[start:end])
        assert torch.equal(got[0], k[:end])
        assert torch.equal(got[1], v[:end])


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    cache = KeyValueCache(40, 4)
    for sequence in range(5):
        cache.reserve(sequence, 8)
    for sequence in (3, 1, 2):  # together six adjacent pages, freed in another order
        cache.release(sequence)
    cache.reserve(7, 24)
    assert cache.pages._runs[7] == [(2, 8)]


def test_pages_grow_where_they_are_adjacent() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 9)
    cache.grow(0, 13)
    cache.grow(0, 5)
    assert cache.pages._runs[0] == [(0, 4)]
    cache.reserve(1, 4)
    cache.grow(0, 20)
    assert cache.pages._runs[0] == [(0, 4), (5, 6)]
    with pytest.raises(CacheFull):
        cache.grow(0, 37)
    assert cache.free_tokens == 16


def test_the_message_has_the_tokens_asked_for_and_those_free() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 30)
    with pytest.raises(CacheFull, match=r"9 tokens need 3 pages .* of 40 tokens 8 are free"):
        cache.reserve(1, 9)


@pytest.mark.parametrize(("start", "count"), [(1, 1), (0, 9)], ids=["gap", "too-many"])
def test_tokens_that_do_not_follow_the_stored_are_refused(start: int, count: int) -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 8)
    part = StepPart(0, start, 0, count)
    with pytest.raises(ValueError, match="do not follow the 0 stored ones within the 8"):
        cache.append(0, part, torch.zeros(count, G, D), torch.zeros(count, G, E))


def chunk(sequence: int, start: int, count: int) -> Chunk:
    return Chunk(sequence=sequence, start=start, ids=[0] * count, num_logits=0)


def test_a_step_is_written_where_each_sequence_has_its_pages() -> None:
    torch.manual_seed(0)
    one, other = KeyValueCache(40, 4), KeyValueCache(40, 4)
    for cache in (one, other):
        cache.reserve(5, 9)
        cache.reserve(2, 6)
    for starts in ((0, 0), (4, 3)):
        step = Step.of([chunk(2, starts[1], 3), chunk(5, starts[0], 4)])
        k, v = torch.randn(7, G, D), torch.randn(7, G, E)
        got = one.write(1, one.place(step), k, v)
        assert got.starts == [starts[1], starts[0]]
        assert got.queries == [(0, 3), (3, 7)]
        for part, ((low, high),) in zip(step.parts, got.runs, strict=True):
            want = other.append(1, part, k[part.rows], v[part.rows])
            assert torch.equal(got.k[:, low:high].transpose(0, 1), want[0])
            assert torch.equal(got.v[:, low:high].transpose(0, 1), want[1])


def test_a_step_that_does_not_follow_is_refused() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 8)
    with pytest.raises(ValueError, match="tokens 0 to 9 do not fit into the 8 reserved"):
        cache.place(Step.of([chunk(0, 0, 9)]))
    pages = cache.place(Step.of([chunk(0, 1, 1)]))
    with pytest.raises(ValueError, match="from 1 on do not follow the 0 stored"):
        cache.write(0, pages, torch.zeros(1, G, D), torch.zeros(1, G, E))


def test_a_sequence_has_pages_once() -> None:
    cache = KeyValueCache(40, 4)
    cache.reserve(0, 8)
    with pytest.raises(ValueError, match="pages already"):
        cache.reserve(0, 8)
