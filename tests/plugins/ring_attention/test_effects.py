"""What the ring sends, keeps and computes, counted against the formulas of its page."""

from __future__ import annotations

import pytest

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.ring_attention import RingAttention, RingAttentionConfig
from tests.support import ring_formula as formula
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
    """Of one rank's keys (and values): the part of the sequence times batch, heads and widths."""
    return case.num_keys // size * (case.batch or 1) * case.groups * sum(widths) * ITEM


@pytest.mark.parametrize("size", [2, 4])
def test_forward_sends_each_block_to_every_other_rank_and_backward_brings_it_home_with_its_sums(
    gloo_pool: GlooPool, size: int
) -> None:
    for outcomes in gloo_pool.run(jobs.attend, size, RING, [*SHAPES.values()]):
        for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
            block = block_bytes(case, size, case.width, case.value_width)
            for seen, rings in ((outcome.forward, 1), (outcome.backward, 2)):
                assert dict(seen.calls) == dict.fromkeys(("send", "recv_"), rings * (size - 1))
                assert seen.sent_bytes["send"] == rings * (size - 1) * block


@pytest.mark.parametrize(("kv_cache", "returning"), [("none", 7), ("half", 3), ("full", 0)])
def test_what_is_kept_does_not_travel_again(
    gloo_pool: GlooPool, kv_cache: KvCache, returning: int
) -> None:
    """Keys are four wide and values three."""
    case, size = Case(width=4, value_width=3), 4
    sent = (size - 1) * block_bytes(case, size, returning + 4 + 3)
    steps = {"none": (4 + 3), "half": size * 4 + 3, "full": size * (4 + 3)}[kv_cache]
    plugin = RingAttention(RingAttentionConfig(kv_cache=kv_cache))
    for (outcome,) in gloo_pool.run(jobs.attend, size, plugin, [case]):
        assert outcome.backward.sent_bytes["send"] == sent
        assert outcome.backward.calls["send"] == (size - 1) * (2 if returning else 1)
        assert outcome.saved_bytes == block_bytes(case, size, steps)


def test_on_one_rank_nothing_is_sent(gloo_pool: GlooPool) -> None:
    ((outcome,),) = gloo_pool.run(jobs.attend, 1, RING, [Case()])
    assert not outcome.forward.calls
    assert not outcome.backward.calls


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
    """Half a block at each step, but the triangle at the first, which has its diagonal too."""
    case = Case()
    part = case.length // size
    for (outcome,) in gloo_pool.run(jobs.attend, size, RING, [case]):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part // 2] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
def test_documents_of_whole_pieces_give_every_rank_the_same_scores(
    gloo_pool: GlooPool, size: int
) -> None:
    """Each document of 2 P pieces of its own, as long as may be."""
    ends = (2 * size, 6 * size, 12 * size)
    case = Case(length=16 * size, mask=c.Mask(document_ends=ends))
    outcomes = gloo_pool.run(jobs.attend, size, RING, [case])
    work = [sum(outcome.visible) for (outcome,) in outcomes]
    lengths = [b - a for a, b in zip((0, *ends), (*ends, 16 * size), strict=True)]
    assert work == [sum(n * (n + 1) // 2 for n in lengths) // size] * size


def test_contiguous_parts_do_not_and_no_hidden_block_is_computed(gloo_pool: GlooPool) -> None:
    case = Case()
    part = case.length // 4
    for rank, (outcome,) in enumerate(gloo_pool.run(jobs.attend, 4, CONTIGUOUS, [case])):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part] * rank


def test_windows_and_documents_leave_out_what_they_hide(gloo_pool: GlooPool) -> None:
    """The inner kernel fails for a block without a visible score; all visible ones are there."""
    mask = c.Mask(window=(3, 0), document_ends=(5, 6, 13, 27))
    visible = int(formula.seen(mask, range(32), range(32)).sum())
    outcomes = gloo_pool.run(jobs.attend, 4, RING, [Case(mask=mask)])
    assert sum(sum(outcome.visible) for (outcome,) in outcomes) == visible


def test_no_rank_ever_holds_the_whole_sequence(gloo_pool: GlooPool) -> None:
    """Ten blocks of keys and values at most, with its own share; who gathers holds 18."""
    case = Case(length=512, groups=4, width=16, value_width=16)
    block = block_bytes(case, 4, 16, 16)
    limit = 14 * block
    for (outcome,) in gloo_pool.run(jobs.attend, 4, RING, [case], True):
        assert outcome.peak_bytes <= limit
    for outcome in gloo_pool.run(jobs.attend_gathering, 4, RING, case):
        assert outcome.peak_bytes > limit
