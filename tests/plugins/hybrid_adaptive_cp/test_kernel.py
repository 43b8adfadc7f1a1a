"""Heads among neighbours, keys between groups: in float64, and what is sent by the formula."""

from __future__ import annotations

import math

import pytest

from ascend_run.plugin_api import HookError, Mask
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import Collectives
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.hybrid_adaptive_cp import HybridAdaptiveCp, HybridAdaptiveCpConfig
from ascend_run.plugins.hybrid_adaptive_cp.kernel import HybridAdaptiveKernel
from tests.support import ring_checks as checks
from tests.support import ring_formula as formula
from tests.support import ring_jobs as jobs
from tests.support.ring_checks import CASES, OWN
from tests.support.ring_formula import Case, FormulaKernel

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


def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool,
) -> None:
    checks.assert_at_parity(gloo_pool, HYBRID, CASES | OWN, 4)
    checks.assert_at_parity(gloo_pool, HYBRID, checks.BIASED, 4, platform=True)


@pytest.mark.parametrize(("degree", "size"), [(1, 4), (4, 4), (1, 2), (2, 2)])
def test_so_they_are_with_any_degree(gloo_pool: GlooPool, degree: int, size: int) -> None:
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig(ulysses_degree=degree))
    checks.assert_at_parity(gloo_pool, plugin, SHAPES, size)


def test_in_bfloat16_it_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool,
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, HYBRID, 4
    )


def sent(seen: Collectives, operation: str, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Messages over a group, and their bytes."""
    found = [m.nbytes for m in seen.messages if (m.operation, m.ranks) == (operation, ranks)]
    return len(found), sum(found)


def test_heads_travel_among_neighbours_and_keys_that_are_seen_between_the_groups(
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
    """Of two groups: the keys of this one that the other sees, and the other way round."""
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


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    with pytest.raises(HookError, match=r"hybrid-adaptive-cp .* Unfit") as refused:
        # The kernel is refused before what stands beside it is read.
        HybridAdaptiveKernel(Unfit(frozenset({"q"})), None, None, None)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3


def test_the_first_message_between_groups_is_one_of_all_of_them(gloo_pool: GlooPool) -> None:
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig())
    for rank, (outcome,) in enumerate(gloo_pool.run(jobs.attend, 4, plugin, [Case()])):
        between = [m for m in outcome.forward.messages if m.ranks == ((0, 2), (1, 3))[rank % 2]]
        assert between[0].operation == "allreduce_"


def test_no_rank_ever_holds_the_whole_sequence(gloo_pool: GlooPool) -> None:
    """In blocks of one rank's keys and values; who gathers holds 27."""
    case = Case(length=512, groups=4, width=16, value_width=16)
    limit = 12 * case.length // SIZE * (case.batch or 1) * case.groups * 32 * ITEM
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, HYBRID, [case], True):
        assert outcome.peak_bytes <= limit
    for outcome in gloo_pool.run(jobs.attend_gathering, SIZE, HYBRID, case):
        assert outcome.peak_bytes > limit
