"""Memory, communication and computation of context parallelism, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from ascend_run.plugin_api import Mask
from ascend_run.testing.pool import GlooPool
from tests.support import ring_formula as formula
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

from .exchanges import IN_BLOCKS, exchange, rows

ITEM: Final = 8
PEAKS: Final[Mapping[str, int]] = {
    "ring-attention": 14,
    "double-ring": 15,
    "hybrid-cp": 15,
    "adaptive-cp": 14,
    "hybrid-adaptive-cp": 12,
}
"""Peak memory of a rank, in units of one rank's keys and values; some of it is the platform's
kernel's, which halves a causal square. A gathering rank holds 18."""


@pytest.mark.exhaustive(by=lambda name: [name.startswith("hybrid")])
@pytest.mark.parametrize("name", rows(PEAKS))
def test_no_rank_ever_holds_the_full_sequence(gloo_pool: GlooPool, name: str) -> None:
    case, plugin = Case(length=512, groups=4, width=16, value_width=16), exchange(name)
    limit = PEAKS[name] * 512 // 4 * (case.batch or 1) * 4 * 32 * ITEM
    for (outcome,) in gloo_pool.run(jobs.attend, 4, plugin, [case], True):
        assert outcome.peak_bytes <= limit
    for outcome in gloo_pool.run(jobs.attend_gathering, 4, plugin, case):
        assert outcome.peak_bytes > limit


@pytest.mark.parametrize("name", rows(("ring-attention", "kv-allgather-cp", "adaptive-cp")))
def test_on_one_rank_nothing_is_sent(gloo_pool: GlooPool, name: str) -> None:
    ((outcome,),) = gloo_pool.run(jobs.attend, 1, exchange(name), [Case()])
    assert not outcome.forward.calls
    assert not outcome.backward.calls


@pytest.mark.exhaustive(by=lambda name: [name.startswith("hybrid")])
@pytest.mark.parametrize("name", rows(IN_BLOCKS))
def test_ranks_have_equal_work_and_no_masked_block_is_computed(
    gloo_pool: GlooPool, name: str
) -> None:
    """The inner kernel fails for a block without a visible score; all visible ones are computed."""
    hidden = Case(mask=Mask(window=(3, 0), document_ends=(5, 6, 13, 27)))
    ranks = gloo_pool.run(jobs.attend, 4, exchange(name), [Case(), hidden])
    assert len({sum(causal.visible) for causal, _ in ranks}) == 1
    for index, case in enumerate((Case(), hidden)):
        work = sum(sum(outcomes[index].visible) for outcomes in ranks)
        heads = 2 if name.startswith("hybrid") else 1  # each neighbour attends with some of them
        whole = range(case.length)
        assert work == heads * int(formula.seen(case.mask, whole, whole).sum())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", rows(("ring-attention", "double-ring")))
@pytest.mark.parametrize(("kv_cache", "returning"), [("none", 7), ("half", 3), ("full", 0)])
def test_saved_keys_and_values_are_not_sent_again(
    gloo_pool: GlooPool, name: str, kv_cache: str, returning: int
) -> None:
    """Keys are four wide and values three."""
    case, size = Case(width=4, value_width=3), 4
    number = case.length // size * (case.batch or 1) * case.groups * ITEM
    steps = {"none": (4 + 3), "half": size * 4 + 3, "full": size * (4 + 3)}[kv_cache]
    plugin = exchange(name, kv_cache=kv_cache)
    for (outcome,) in gloo_pool.run(jobs.attend, size, plugin, [case]):
        assert outcome.backward.sent_bytes["send"] == (size - 1) * number * (returning + 4 + 3)
        assert outcome.backward.calls["send"] == (size - 1) * (2 if returning else 1)
        assert outcome.saved_bytes == number * steps
