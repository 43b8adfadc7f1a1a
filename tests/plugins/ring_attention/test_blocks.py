"""The cut of the sequence and of the scores, before torch is imported."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.plugin_api import Claim, Mask, Numerics, RunConfig
from ascend_run.plugin_api.config import FieldSection
from ascend_run.plugins.ring_attention import RingAttention, RingAttentionConfig
from ascend_run.plugins.ring_attention.blocks import ring_steps
from ascend_run.plugins.ring_attention.partition import PARTITIONS, Contiguous, ZigZag

from .formula import positions, seen

masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    document_ends=st.none() | st.lists(st.integers(1, 40), max_size=5).map(lambda e: (*sorted(e),)),
)


@given(
    mask=masks,
    cut=st.sampled_from(sorted(PARTITIONS)),
    size=st.integers(1, 4),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_the_blocks_of_all_steps_are_the_mask_each_visible_score_once(
    mask: Mask, cut: str, size: int, parts: tuple[int, int]
) -> None:
    """Against a dense mask: nothing twice, nothing left out, and no block without a score."""
    num_queries, num_keys = (2 * size * part for part in parts)
    for rank in range(size):
        rows = positions(num_queries, rank, size, cut)
        counted: Counter[tuple[int, int]] = Counter()
        steps = ring_steps(mask, PARTITIONS[cut], num_queries, num_keys, rank, size)
        for step, blocks in enumerate(steps):
            columns = positions(num_keys, (rank - step) % size, size, cut)
            assert len(blocks) <= 4
            for block in blocks:
                here, there = rows[block.rows], columns[block.columns]
                first, last = block.mask.query_start, block.mask.key_start
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
def test_a_causal_mask_costs_one_call_a_step_and_only_the_first_has_a_mask(size: int) -> None:
    length = 8 * size
    part, half = 8, 4
    for rank in range(size):
        first, *others = ring_steps(Mask(), ZigZag(), length, length, rank, size)
        assert [(b.queries, b.keys, b.mask) for b in first] == [((0, part), (0, part), Mask())]
        for step, blocks in enumerate(others, start=1):
            earlier = step <= rank
            queries, keys = ((0, part), (0, half)) if earlier else ((half, part), (0, part))
            assert [(b.queries, b.keys) for b in blocks] == [(queries, keys)]
            assert blocks[0].mask == Mask(causal=False)


def test_without_a_mask_a_step_is_one_call_of_everything() -> None:
    for blocks in ring_steps(Mask(causal=False), ZigZag(), 32, 32, 1, 4):
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


def run_of(cp: int) -> RunConfig:
    return RunConfig(model=FieldSection({}), parallel=FieldSection({"context_parallel_size": cp}))


@pytest.mark.parametrize(("cut", "expected"), [("zig-zag", ZigZag()), ("contiguous", Contiguous())])
def test_it_cuts_the_sequence_as_asked_and_is_idle_exactly_where_nothing_is_cut(
    cut: str, expected: object
) -> None:
    plugin = RingAttention(RingAttentionConfig(cut=cut))  # type: ignore[arg-type]
    assert plugin.manifest.idle is not None
    for size in (1, 2):
        run = run_of(size)
        assert plugin.manifest.idle.holds(run) == (size == 1)
        partition = plugin.ascend_sequence_partition(config=run)
        assert partition == (expected if size > 1 else None)


def test_it_owns_the_sequence_exchange_and_changes_rounding_only() -> None:
    assert RingAttention.manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert RingAttention.manifest.numerics is Numerics.ROUNDING
