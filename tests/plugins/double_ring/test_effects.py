"""What the double ring sends, over which links, and keeps, against the formulas of its page."""

from __future__ import annotations

from collections import Counter

import pytest

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import Collectives
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.double_ring import DoubleRing, DoubleRingConfig
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
SIZE = 4
SHAPES = {
    "multi-head": Case(),
    "multi-query": Case(groups=1),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=2),
    "documents": Case(mask=c.Mask(document_ends=(3, 9, 17))),
}


def block_bytes(case: Case, *widths: int) -> int:
    """Of one rank's keys (and values): the part of the sequence times batch, heads and widths."""
    return case.num_keys // SIZE * (case.batch or 1) * case.groups * sum(widths) * ITEM


def sends(seen: Collectives) -> Counter[tuple[int, ...]]:
    """Ranks of a group -> messages over it."""
    return Counter(m.ranks for m in seen.messages if m.operation == "send")


@pytest.mark.parametrize("window", [1, 2, 4])
def test_it_sends_what_a_ring_sends_and_all_but_a_few_messages_within_windows(
    gloo_pool: GlooPool, window: int
) -> None:
    plugin = DoubleRing(DoubleRingConfig(window=window))
    windows = SIZE // window
    inside, across = windows * (window - 1), windows - 1
    for rank, outcomes in enumerate(gloo_pool.run(jobs.attend, SIZE, plugin, [*SHAPES.values()])):
        first = rank // window * window
        mine, others = range(first, first + window), range(rank % window, SIZE, window)
        expected = {(*mine,): inside, (*others,): across}
        for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
            block = block_bytes(case, case.width, case.value_width)
            for seen, rings in ((outcome.forward, 1), (outcome.backward, 2)):
                assert seen.sent_bytes["send"] == rings * (SIZE - 1) * block
                wanted = Counter({ranks: rings * n for ranks, n in expected.items() if n})
                assert sends(seen) == wanted


@pytest.mark.parametrize(("kv_cache", "returning"), [("none", 7), ("half", 3), ("full", 0)])
def test_what_is_kept_does_not_travel_again(
    gloo_pool: GlooPool, kv_cache: KvCache, returning: int
) -> None:
    """Keys are four wide and values three."""
    case = Case(width=4, value_width=3)
    sent = (SIZE - 1) * block_bytes(case, returning + 4 + 3)
    steps = {"none": (4 + 3), "half": SIZE * 4 + 3, "full": SIZE * (4 + 3)}[kv_cache]
    plugin = DoubleRing(DoubleRingConfig(kv_cache=kv_cache))
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, plugin, [case]):
        assert outcome.backward.sent_bytes["send"] == sent
        assert outcome.backward.calls["send"] == (SIZE - 1) * (2 if returning else 1)
        assert outcome.saved_bytes == block_bytes(case, steps)


def test_every_rank_has_the_same_work_at_every_step(gloo_pool: GlooPool) -> None:
    case = Case()
    part = case.length // SIZE
    plugin = DoubleRing(DoubleRingConfig())
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, plugin, [case]):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part // 2] * (SIZE - 1)


def test_no_rank_ever_holds_the_whole_sequence(gloo_pool: GlooPool) -> None:
    case = Case(length=512, groups=4, width=16, value_width=16)
    plugin = DoubleRing(DoubleRingConfig())
    # Of these blocks the platform's kernel holds some, which cuts a causal square into halves.
    limit = 15 * block_bytes(case, 16, 16)
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, plugin, [case], True):
        assert outcome.peak_bytes <= limit
    for outcome in gloo_pool.run(jobs.attend_gathering, SIZE, plugin, case):
        assert outcome.peak_bytes > limit
