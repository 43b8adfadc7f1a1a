"""The partition of sequence and scores, before torch is imported."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.context_parallel.blocks import holder, ring_steps
from ascend_run.ops.attention.context_parallel.partitions import (
    PARTITIONS,
    Contiguous,
    Nested,
    ZigZag,
)
from ascend_run.plugin_api import Mask, RunConfig
from ascend_run.plugins.sequence.ring_attention import RingAttention, RingAttentionConfig
from tests.support.ring_formula import positions, seen
from tests.support.tiny_configs import model_fields, parallel_fields

masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    document_ends=st.none() | st.lists(st.integers(1, 40), max_size=5).map(lambda e: (*sorted(e),)),
)


@given(
    mask=masks,
    cut=st.sampled_from(sorted(PARTITIONS)),
    size=st.sampled_from([1, 2, 3, 4, 6]),
    window=st.integers(1, 6),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    placed=st.booleans(),
)
def test_the_blocks_of_all_steps_are_the_mask_each_visible_score_once(
    mask: Mask, cut: str, size: int, window: int, parts: tuple[int, int], placed: bool
) -> None:
    """Against a dense mask: nothing twice, nothing missing, and no block without a visible
    score."""
    num_queries, num_keys = (2 * size * part for part in parts)
    window = math.gcd(window, size)
    partition = (
        PARTITIONS[cut].of_documents(mask.document_ends) if mask.document_ends else PARTITIONS[cut]
    )

    def held(length: int, rank: int) -> list[int]:
        return [p for chunk in partition.chunks(length, rank, size) for p in range(*chunk)]

    for rank in range(size):
        rows = held(num_queries, rank)
        counted: Counter[tuple[int, int]] = Counter()
        steps = ring_steps(mask, PARTITIONS[cut], num_queries, num_keys, rank, size, window, placed)
        for step, blocks in enumerate(steps):
            columns = held(num_keys, holder(rank, step, size, window))
            for block in blocks:
                here, there = rows[block.rows], columns[block.columns]
                first, last = block.mask.query_start, block.mask.key_start
                if placed:
                    assert here == [*range(first, first + len(here))]
                    assert there == [*range(last, last + len(there))]
                inner = seen(
                    block.mask,
                    range(first, first + len(here)),
                    range(last, last + len(there)),
                )
                assert inner.any()
                counted.update((here[i], there[j]) for i, j in inner.nonzero().tolist())
        allowed = seen(mask, rows, range(num_keys)).nonzero().tolist()
        assert counted == Counter({(rows[i], j): 1 for i, j in allowed})


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_causal_mask_costs_one_call_per_step_masked_only_in_the_first(size: int) -> None:
    length = 8 * size
    part, half = 8, 4
    for rank in range(size):
        first, *others = ring_steps(Mask(), ZigZag(), length, length, rank, size, size)
        assert [(b.queries, b.keys, b.mask) for b in first] == [((0, part), (0, part), Mask())]
        for step, blocks in enumerate(others, start=1):
            earlier = step <= rank
            queries, keys = ((0, part), (0, half)) if earlier else ((half, part), (0, part))
            assert [(b.queries, b.keys) for b in blocks] == [(queries, keys)]
            assert blocks[0].mask == Mask(causal=False)


def test_without_a_mask_a_step_is_one_call_of_everything() -> None:
    for blocks in ring_steps(Mask(causal=False), ZigZag(), 32, 32, 1, 4, 4):
        assert [(b.queries, b.keys) for b in blocks] == [((0, 8), (0, 8))]


@given(size=st.integers(1, 16), part=st.integers(1, 32), cut=st.sampled_from(sorted(PARTITIONS)))
def test_the_ranks_chunks_are_the_sequence_once(size: int, part: int, cut: str) -> None:
    partition = PARTITIONS[cut]
    length = size * part * partition.multiple
    chunks = [c for rank in range(size) for c in partition.chunks(length, rank, size)]
    held = [p for start, stop in chunks for p in range(start, stop)]
    assert sorted(held) == list(range(length))
    for rank in range(size):
        mine = [p for c in partition.chunks(length, rank, size) for p in range(*c)]
        assert mine == positions(length, rank, size, cut)


@given(size=st.integers(1, 16), part=st.integers(1, 32))
def test_zig_zag_gives_every_rank_equally_many_visible_scores(size: int, part: int) -> None:
    length = 2 * size * part
    work = {
        sum(p + 1 for c in ZigZag().chunks(length, rank, size) for p in range(*c))
        for rank in range(size)
    }
    assert len(work) == 1


layouts = st.integers(1, 8).flatmap(
    lambda size: st.integers(1, 24).flatmap(
        lambda part: st.tuples(
            st.just(size),
            st.just(size * part),
            st.sets(st.integers(1, size * part), min_size=1, max_size=12).map(
                lambda e: (*sorted(e),)
            ),
        )
    )
)


@given(layout=layouts, degree=st.integers(1, 4))
def test_documents_of_any_lengths_are_shared_out_evenly(
    layout: tuple[int, int, tuple[int, ...]], degree: int
) -> None:
    """Every position once, equally many per rank, in order; and equal work, up to rounding shards
    to full tokens: less than two tokens that see all of the longest document."""
    size, length, ends = layout
    cut = ZigZag().of_documents(ends)
    held = [
        [p for chunk in cut.chunks(length, rank, size) for p in range(*chunk)]
        for rank in range(size)
    ]
    assert sorted(p for mine in held for p in mine) == [*range(length)]
    bounds = sorted({0, length, *ends})
    work = []
    for mine in held:
        assert len(mine) == length // size
        assert mine == sorted(mine)
        work.append(sum(p + 1 - bounds[bisect.bisect_right(bounds, p) - 1] for p in mine))
    longest = max(b - a for a, b in pairwise(bounds))
    assert max(work) - min(work) <= 2 * longest
    if size % degree == 0:
        outer = size // degree
        nested = Nested(ZigZag(), degree).of_documents(ends)
        if length % size == 0:
            for group in range(outer):
                whole = [p for c in cut.chunks(length, group, outer) for p in range(*c)]
                parts = [
                    [p for c in nested.chunks(length, group * degree + u, size) for p in range(*c)]
                    for u in range(degree)
                ]
                assert [p for part in parts for p in part] == whole
                assert len({len(part) for part in parts}) == 1


def test_documents_of_2_p_chunks_are_cut_as_each_alone_would_be() -> None:
    chunks = [ZigZag().of_documents((16,)).chunks(24, rank, 2) for rank in range(2)]
    assert chunks == [
        ((0, 4), (12, 16), (16, 18), (22, 24)),
        ((4, 8), (8, 12), (18, 20), (20, 22)),
    ]


def test_many_documents_cost_one_call_each_and_the_first_step_one() -> None:
    ends = (*range(64, 1024, 64),)
    for rank in range(4):
        first, *others = ring_steps(Mask(document_ends=ends), ZigZag(), 1024, 1024, rank, 4, 4)
        assert len(first) == 1
        assert first[0].mask == Mask(document_ends=(*range(16, 257, 16),)[:-1])
        assert [len(blocks) for blocks in others] == [16] * 3


def run_of(cp: int) -> RunConfig:
    return RunConfig(model=model_fields(), parallel=parallel_fields({"context_parallel_size": cp}))


@pytest.mark.parametrize(("cut", "expected"), [("zig-zag", ZigZag()), ("contiguous", Contiguous())])
def test_it_partitions_the_sequence_and_is_idle_on_one_rank(cut: str, expected: object) -> None:
    plugin = RingAttention(RingAttentionConfig(cut=cut))  # type: ignore[arg-type]
    assert plugin.manifest.idle is not None
    for size in (1, 2):
        run = run_of(size)
        assert plugin.manifest.idle.holds(run) == (size == 1)
        partition = plugin.ascend_sequence_partition(config=run)
        assert partition == (expected if size > 1 else None)
