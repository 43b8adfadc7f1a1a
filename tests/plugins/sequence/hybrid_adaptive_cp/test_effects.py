"""All-to-all among neighbours, keys between groups: results in float64, and communication by
formula."""

from __future__ import annotations

import math

from ascend_run.plugin_api import Mask
from ascend_run.plugins.sequence.hybrid_adaptive_cp import HybridAdaptiveCp, HybridAdaptiveCpConfig
from ascend_run.testing.effects import Collectives
from ascend_run.testing.pool import GlooPool
from tests.support import ring_formula as formula
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
SIZE, DEGREE = 4, 2
HYBRID = HybridAdaptiveCp(HybridAdaptiveCpConfig())
IN_ORDER = HybridAdaptiveCp(HybridAdaptiveCpConfig(remap=False))
SHAPES = {
    "multi-head": Case(),
    "multi-query": Case(groups=1, mask=Mask(window=(3, 0))),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=2),
    "documents": Case(mask=Mask(document_ends=(3, 9, 17))),
    "nothing-to-send": Case(mask=Mask(document_ends=(16,))),
}


def sent(seen: Collectives, operation: str, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of calls over a group, and their bytes."""
    found = [
        m.nbytes for m in seen.collective_calls if (m.operation, m.ranks) == (operation, ranks)
    ]
    return len(found), sum(found)


def test_heads_are_sent_to_neighbours_and_visible_keys_between_groups(
    gloo_pool: GlooPool,
) -> None:
    for plugin in (HYBRID, IN_ORDER):
        ranks = gloo_pool.run(jobs.attend, SIZE, plugin, [*SHAPES.values()])
        for rank, outcomes in enumerate(ranks):
            group, place = divmod(rank, DEGREE)
            neighbours = (*range(group * DEGREE, (group + 1) * DEGREE),)
            others = (*range(place, SIZE, DEGREE),)
            for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
                rows = case.length // SIZE * (case.batch or 1) * ITEM
                copies = math.lcm(case.groups, DEGREE)
                widths = case.width + case.value_width
                there = rows * (case.heads * case.width + copies * widths)
                back, lse = rows * case.heads * case.value_width, rows * case.heads
                exchanged = sent(outcome.forward, "alltoall_base_", neighbours)
                assert exchanged == (2, there + back + lse)
                assert sent(outcome.backward, "alltoall_base_", neighbours) == (2, there + back)
                each = (case.batch or 1) * copies // DEGREE * widths * ITEM
                out, taken = keys_between(plugin, case, group)
                assert sent(outcome.forward, "send", others) == (int(out > 0), out * each)
                messages = int(out > 0) + int(taken > 0), (out + taken) * each
                assert sent(outcome.backward, "send", others) == messages


def keys_between(plugin: HybridAdaptiveCp, case: Case, group: int) -> tuple[int, int]:
    """Return for two groups the keys that each sees of the other."""
    held = [
        [
            p
            for rank in range(first, first + DEGREE)
            for p in jobs.held(plugin, case, case.length, rank, SIZE)
        ]
        for first in range(0, SIZE, DEGREE)
    ]
    mine, others = held[group], held[1 - group]
    out, taken = (
        int(formula.seen(case.mask, queries, keys).any(0).sum())
        for queries, keys in ((others, mine), (mine, others))
    )
    return out, taken


def test_the_first_message_between_groups_is_one_of_all_of_them(gloo_pool: GlooPool) -> None:
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig())
    for rank, (outcome,) in enumerate(gloo_pool.run(jobs.attend, 4, plugin, [Case()])):
        between = [
            m for m in outcome.forward.collective_calls if m.ranks == ((0, 2), (1, 3))[rank % 2]
        ]
        assert between[0].operation == "allreduce_"
