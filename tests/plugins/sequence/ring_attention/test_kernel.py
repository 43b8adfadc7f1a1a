"""Tests of the ring that the shared context-parallel suite lacks, in float64."""

from __future__ import annotations

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.ring_attention import RingAttention, RingAttentionConfig
from ascend_run.testing.pool import GlooPool
from tests.support import ring_checks as checks
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

RING = RingAttention(RingAttentionConfig())


def test_where_the_caller_says_that_its_part_begins_does_not_matter(gloo_pool: GlooPool) -> None:
    """The mask is that of the full sequence."""
    cases = [Case(), Case(mask=c.Mask(query_start=8, key_start=8))]
    for first, second in gloo_pool.run(jobs.attend, 2, RING, cases):
        assert torch.equal(first.out, second.out)


@settings(max_examples=4, deadline=None)
@given(case=checks.cases(), probability=st.floats(0.05, 0.6), size=st.sampled_from([2, 4]))
def test_every_gradient_is_that_of_what_was_kept(
    gloo_pool: GlooPool, case: Case, probability: float, size: int
) -> None:
    case = attrs.evolve(case, dropout=probability)
    checks.assert_dropout_is_that_of_the_formula(gloo_pool, RING, case, size)
