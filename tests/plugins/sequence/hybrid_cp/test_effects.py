"""What is sent, over which links, against the formulas of the page."""

from __future__ import annotations

import math

import pytest

from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.hybrid_cp import HybridCp, HybridCpConfig
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


def sent(seen: Collectives, operation: str, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of calls over a group, and their bytes."""
    found = [
        m.nbytes for m in seen.collective_calls if (m.operation, m.ranks) == (operation, ranks)
    ]
    return len(found), sum(found)


@pytest.mark.exhaustive(by=lambda degree: [degree == 2])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_heads_travel_among_neighbours_and_keys_round_the_ring(
    gloo_pool: GlooPool, degree: int
) -> None:
    plugin = HybridCp(HybridCpConfig(ulysses_degree=degree))
    hops = SIZE // degree - 1
    for rank, outcomes in enumerate(gloo_pool.run(jobs.attend, SIZE, plugin, [*SHAPES.values()])):
        first = rank // degree * degree
        neighbours = (*range(first, first + degree),)
        ring = (*range(rank % degree, SIZE, degree),)
        for case, outcome in zip(SHAPES.values(), outcomes, strict=True):
            rows = case.length // SIZE * (case.batch or 1) * ITEM
            heads, copies = case.heads, math.lcm(case.groups, degree)
            widths = case.width + case.value_width
            inputs = rows * (heads * case.width + copies * widths)
            back, lse = rows * heads * case.value_width, rows * heads
            exchanged = sent(outcome.forward, "alltoall_base_", neighbours)
            assert exchanged == (2, inputs + back + lse)
            exchanged = sent(outcome.backward, "alltoall_base_", neighbours)
            assert exchanged == (2, inputs + back)
            block = rows * copies * widths
            for seen, rings in ((outcome.forward, 1), (outcome.backward, 2)):
                assert sent(seen, "send", ring) == (rings * hops, rings * hops * block)
                calls = {"alltoall_base_": 2, "send": rings * hops, "recv_": rings * hops}
                assert dict(seen.calls) == {name: n for name, n in calls.items() if n}


def test_the_ring_may_have_windows(gloo_pool: GlooPool) -> None:
    plugin = HybridCp(HybridCpConfig(ulysses_degree=1, window=2))
    for rank, (outcome,) in enumerate(gloo_pool.run(jobs.attend, SIZE, plugin, [Case()])):
        window = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert sent(outcome.forward, "send", window)[0] == 2
        assert sent(outcome.forward, "send", (rank % 2, rank % 2 + 2))[0] == 1


def test_every_rank_has_the_same_work(gloo_pool: GlooPool) -> None:
    case = Case(mask=c.Mask(document_ends=(8, 24)))
    outcomes = gloo_pool.run(jobs.attend, SIZE, HybridCp(HybridCpConfig()), [case])
    assert len({sum(outcome.visible) for (outcome,) in outcomes}) == 1
