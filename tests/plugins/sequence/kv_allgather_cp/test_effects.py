"""What is gathered, reduce-scattered, saved and computed, against the formulas of its page."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.context_parallel.gathered_blocks import GatheredBlock, gathered_work
from ascend_run.ops.attention.context_parallel.options import KvCache
from ascend_run.ops.attention.context_parallel.partitions import PARTITIONS
from ascend_run.plugin_api import Mask
from ascend_run.plugins.sequence.kv_allgather_cp import KvAllgatherCp, KvAllgatherCpConfig
from ascend_run.testing.pool import GlooPool
from tests.support import ring_formula as formula
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
SIZE = 4
SHAPES = {
    "multi-head": Case(),
    "multi-query": Case(groups=1),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=2),
    "fewer-keys": Case(mask=Mask(causal=False), key_length=16),
    "documents": Case(mask=Mask(document_ends=(3, 9, 17))),
}


def own_bytes(case: Case, *widths: int) -> int:
    """Return bytes of one rank's keys (and values): its sequence length times batch, heads,
    widths."""
    return case.num_keys // SIZE * (case.batch or 1) * case.groups * sum(widths) * ITEM


@pytest.mark.exhaustive
@pytest.mark.parametrize("at_once", [None, 1, 3])
@pytest.mark.parametrize(("kv_cache", "again"), [("none", 2), ("half", 1), ("full", 0)])
def test_each_chunk_of_heads_is_gathered_twice_and_reduced_once(
    gloo_pool: GlooPool, kv_cache: KvCache, again: int, at_once: int | None
) -> None:
    """Once in forward and once in backward; gradients return to their owners."""
    options = KvAllgatherCpConfig(kv_cache=kv_cache, groups_at_once=at_once)
    plugin = KvAllgatherCp(options)
    for outcomes in gloo_pool.run(jobs.attend, SIZE, plugin, [*SHAPES.values()]):
        for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
            parts = math.ceil(case.groups / (at_once or case.groups))
            both = own_bytes(case, case.width, case.value_width)
            assert dict(outcome.forward.calls) == {"_allgather_base_": parts}
            assert outcome.forward.sent_bytes["_allgather_base_"] == both
            calls = {"_allgather_base_": parts if again else 0, "_reduce_scatter_base_": parts}
            assert dict(outcome.backward.calls) == {name: n for name, n in calls.items() if n}
            values = own_bytes(case, case.value_width)
            resent = {2: both, 1: values, 0: 0}[again]
            assert outcome.backward.sent_bytes["_allgather_base_"] == resent
            assert outcome.backward.sent_bytes["_reduce_scatter_base_"] == SIZE * both
            kept = {2: 0, 1: SIZE * (both - values), 0: SIZE * both}[again]
            assert outcome.saved_bytes == kept


def test_ranks_have_equal_work_in_three_calls_without_masked_blocks(
    gloo_pool: GlooPool,
) -> None:
    """Its own triangle; all keys before its early chunk; and for the late chunk, all keys between
    the two. For the first and the last rank one of these is empty."""
    plugin = KvAllgatherCp(KvAllgatherCpConfig())
    case, documents = Case(), Case(mask=Mask(document_ends=(8, 24)))
    hidden = Case(mask=Mask(window=(3, 0), document_ends=(5, 6, 13, 27)))
    ranks = gloo_pool.run(jobs.attend, SIZE, plugin, [case, documents, hidden])
    half = case.length // (2 * SIZE)
    for rank, (outcome, *_) in enumerate(ranks):
        first, *others = outcome.visible
        assert first == half * (2 * half + 1)
        before, between = 2 * half * rank * half, half * (2 * (SIZE - 1 - rank)) * half
        assert others == [n for n in (before, between) if n]
    for index, whole in enumerate((case, documents, hidden)):
        work = [sum(outcomes[index].visible) for outcomes in ranks]
        length = whole.length
        assert sum(work) == int(formula.seen(whole.mask, range(length), range(length)).sum())
        assert index == 2 or len({*work}) == 1


def test_heads_in_parts_bound_what_a_rank_holds_of_the_sequence(gloo_pool: GlooPool) -> None:
    """In units of one rank's keys and values. With two parts of the heads, memory has the keys of
    four ranks, a contiguous copy of one rank's, and the gradients, an eighth each. Gathering all
    heads at once takes twice as much, and so does gathering the full problem."""
    case = Case(length=512, groups=8, heads=8, width=16, value_width=16)
    limit = 9 * own_bytes(case, 16, 16)
    plugin = KvAllgatherCp(KvAllgatherCpConfig(groups_at_once=1))
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, plugin, [case], True):
        assert outcome.peak_bytes <= limit
    at_once = KvAllgatherCp(KvAllgatherCpConfig())
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, at_once, [case], True):
        assert outcome.peak_bytes > limit
    for outcome in gloo_pool.run(jobs.attend_gathering, SIZE, plugin, case):
        assert outcome.peak_bytes > limit


masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    document_ends=st.none() | st.lists(st.integers(1, 40), max_size=5).map(lambda e: (*sorted(e),)),
)


@given(
    mask=masks,
    cut=st.sampled_from(sorted(PARTITIONS)),
    size=st.sampled_from([1, 2, 3, 4]),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    placed=st.booleans(),
)
def test_the_blocks_cover_each_visible_score_once_without_idle_end_keys(
    mask: Mask, cut: str, size: int, parts: tuple[int, int], placed: bool
) -> None:
    """Without torch: own blocks and the others', by the positions of what ranks hold."""
    num_queries, num_keys = (2 * size * part for part in parts)
    partition = (
        PARTITIONS[cut].of_documents(mask.document_ends) if mask.document_ends else PARTITIONS[cut]
    )
    held = [
        [p for chunk in partition.chunks(num_keys, rank, size) for p in range(*chunk)]
        for rank in range(size)
    ]
    for rank in range(size):
        rows = [p for chunk in partition.chunks(num_queries, rank, size) for p in range(*chunk)]
        work = gathered_work(mask, PARTITIONS[cut], num_queries, num_keys, rank, size, placed)
        counted: Counter[tuple[int, int]] = Counter()
        for found in (*work.own, *work.others):
            here, there, inner = _positions(found, rows, held)
            if placed:
                first, last = found.block.mask.query_start, found.block.mask.key_start
                assert here == [*range(first, first + len(here))]
                assert there == [*range(last, last + len(there))]
            counted.update((here[i], there[j]) for i, j in inner.nonzero().tolist())
            if found in work.others:
                assert inner[:, 0].any()
                assert inner[:, -1].any()
        allowed = formula.seen(mask, rows, range(num_keys)).nonzero().tolist()
        assert counted == Counter({(rows[i], j): 1 for i, j in allowed})


def _positions(
    found: GatheredBlock, rows: list[int], held: list[list[int]]
) -> tuple[list[int], list[int], object]:
    here = rows[found.block.rows]
    there = [p for source in found.sources for p in held[source.rank][source.rows]]
    first, last = found.block.mask.query_start, found.block.mask.key_start
    inner = formula.seen(
        found.block.mask, range(first, first + len(here)), range(last, last + len(there))
    )
    return here, there, inner
