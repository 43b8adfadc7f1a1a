"""What the ring sends, saves and computes, counted against the formulas of its page."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.ring_attention import RingAttention, RingAttentionConfig
from ascend_run.testing.pool import GlooPool
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
RING = RingAttention(RingAttentionConfig())
CONTIGUOUS = RingAttention(RingAttentionConfig(cut="contiguous"))
SHAPES = {
    "multi-head": Case(),
    "multi-query": Case(groups=1),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=2),
    "fewer-keys": Case(mask=c.Mask(causal=False), key_length=16),
    "documents": Case(mask=c.Mask(document_ends=(3, 9, 17))),
}


def block_bytes(case: Case, size: int, *widths: int) -> int:
    """Return bytes of one rank's keys (and values): its sequence length times batch, heads,
    widths."""
    return case.num_keys // size * (case.batch or 1) * case.groups * sum(widths) * ITEM


@pytest.mark.parametrize("size", [2, 4])
def test_each_block_visits_every_rank_and_returns_with_its_gradients(
    gloo_pool: GlooPool, size: int
) -> None:
    """Forward sends each block to every other rank; backward returns it to its owner."""
    for outcomes in gloo_pool.run(jobs.attend, size, RING, [*SHAPES.values()]):
        for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
            block = block_bytes(case, size, case.width, case.value_width)
            for seen, rings in ((outcome.forward, 1), (outcome.backward, 2)):
                assert dict(seen.calls) == dict.fromkeys(("send", "recv_"), rings * (size - 1))
                assert seen.sent_bytes["send"] == rings * (size - 1) * block


def test_the_ring_ends_where_no_rank_looks_any_farther(gloo_pool: GlooPool) -> None:
    """Four ranks hold eight positions each."""
    hops = {7: 1, 8: 1, 9: 2, 16: 2, 17: 3}
    cases = [Case(mask=c.Mask(window=(window, 0))) for window in hops]
    for outcomes in gloo_pool.run(jobs.attend, 4, CONTIGUOUS, cases):
        for outcome, expected in zip(outcomes, hops.values(), strict=True):
            assert outcome.forward.calls["send"] == expected
            assert outcome.backward.calls["send"] == 2 * expected


@pytest.mark.parametrize("size", [2, 4])
def test_zig_zag_gives_every_rank_the_same_work_at_every_step(
    gloo_pool: GlooPool, size: int
) -> None:
    """Half a block at each step, except the triangle at the first, which includes its diagonal."""
    case = Case()
    part = case.length // size
    for (outcome,) in gloo_pool.run(jobs.attend, size, RING, [case]):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part // 2] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
def test_documents_of_full_chunks_give_every_rank_the_same_scores(
    gloo_pool: GlooPool, size: int
) -> None:
    """Each document has 2 P chunks, of any length."""
    ends = (2 * size, 6 * size, 12 * size)
    case = Case(length=16 * size, mask=c.Mask(document_ends=ends))
    outcomes = gloo_pool.run(jobs.attend, size, RING, [case])
    work = [sum(outcome.visible) for (outcome,) in outcomes]
    lengths = [b - a for a, b in zip((0, *ends), (*ends, 16 * size), strict=True)]
    assert work == [sum(n * (n + 1) // 2 for n in lengths) // size] * size


def test_contiguous_chunks_do_not_and_no_masked_block_is_computed(gloo_pool: GlooPool) -> None:
    case = Case()
    part = case.length // 4
    for rank, (outcome,) in enumerate(gloo_pool.run(jobs.attend, 4, CONTIGUOUS, [case])):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part] * rank
