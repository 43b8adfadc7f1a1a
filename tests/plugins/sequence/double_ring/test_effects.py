"""What the double ring sends over which links, and saves, against the formulas of its page."""

from __future__ import annotations

from collections import Counter

import pytest

from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.double_ring import DoubleRing, DoubleRingConfig
from ascend_run.testing.effects import Collectives
from ascend_run.testing.pool import GlooPool
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
    """Return bytes of one rank's keys (and values): its sequence length times batch, heads,
    widths."""
    return case.num_keys // SIZE * (case.batch or 1) * case.groups * sum(widths) * ITEM


def sends(seen: Collectives) -> Counter[tuple[int, ...]]:
    """Return ranks of a group -> sends over it."""
    return Counter(m.ranks for m in seen.collective_calls if m.operation == "send")


@pytest.mark.exhaustive(by=lambda window: [window == 2])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_it_sends_as_much_as_a_ring_mostly_within_windows(gloo_pool: GlooPool, window: int) -> None:
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


def test_every_rank_has_the_same_work_at_every_step(gloo_pool: GlooPool) -> None:
    case = Case()
    part = case.length // SIZE
    plugin = DoubleRing(DoubleRingConfig())
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, plugin, [case]):
        assert outcome.visible == [part * (part + 1) // 2] + [part * part // 2] * (SIZE - 1)
