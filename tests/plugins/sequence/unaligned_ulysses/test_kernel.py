"""Uneven heads and lengths on 2 and 4 ranks against attention on the full sequence, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.attention.head_shares import head_shares, parts
from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.unaligned_ulysses import UnalignedUlysses, UnalignedUlyssesConfig
from ascend_run.testing.pool import GlooPool
from tests.support import ring_checks as checks
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
LENGTH = 30
CASES = {
    "multi-head": Case(heads=7, groups=7, length=LENGTH),
    "grouped": Case(heads=10, groups=5, length=LENGTH, width=6, value_width=3),
    "a-group-for-several-ranks": Case(heads=6, groups=2, length=29, slopes=True),
    "multi-query": Case(heads=5, groups=1, length=LENGTH),
    "packed": Case(heads=9, groups=3, length=LENGTH, batch=None),
    "documents": Case(heads=7, groups=7, length=LENGTH, mask=c.Mask(document_ends=(5, 6, 13))),
    "window": Case(heads=5, groups=5, length=31, mask=c.Mask(causal=False, window=(3, 5))),
    "uneven-heads-alone": Case(heads=6, groups=3),
    "uneven-parts-alone": Case(length=31),
    "even": Case(),
    "shorter-than-two-a-rank": Case(heads=4, groups=2, length=5),
    "inner-reads-no-inputs": Case(
        heads=10, groups=5, length=LENGTH, reads=frozenset({"out", "lse"})
    ),
}


def unaligned(**options: Any) -> UnalignedUlysses:
    return UnalignedUlysses(UnalignedUlyssesConfig(**options))


@pytest.mark.exhaustive(by=lambda size: [size])
@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_match_the_full_sequence_and_sends_match_the_page(
    gloo_pool: GlooPool, size: int, kv_cache: str
) -> None:
    outcomes = checks.assert_at_parity(gloo_pool, unaligned(kv_cache=kv_cache), CASES, size)
    for rank, of_rank in enumerate(outcomes):
        for case, seen in zip(CASES.values(), of_rank, strict=True):
            shares, rows = head_shares(case.heads, case.groups, size), (case.batch or 1) * ITEM
            start, stop = parts(case.length, size)[rank]
            held, heads = (stop - start) * rows, shares[rank].num_queries
            keys, every = shares[rank].num_groups, sum(share.num_groups for share in shares)
            widths = case.width + case.value_width
            again = {"none": widths, "half": case.value_width, "full": 0}[kv_cache]
            if "k" not in case.reads:
                again = 0
            out, whole = case.value_width, case.length * rows
            forward = held * (case.heads * case.width + every * widths) + whole * heads * (out + 1)
            backward = held * (case.heads * out + every * again)
            backward += whole * (heads * case.width + keys * widths)
            for messages, nbytes in ((seen.forward, forward), (seen.backward, backward)):
                assert dict(messages.calls) == {"alltoall_base_": 2}
                assert messages.sent_bytes["alltoall_base_"] == nbytes


def test_so_it_is_by_the_platforms_kernel_with_what_belongs_to_a_head(gloo_pool: GlooPool) -> None:
    named = {
        "sinks": Case(heads=5, groups=5, length=LENGTH, sinks=True),
        "slopes-and-sinks": Case(heads=6, groups=3, length=29, sinks=True, slopes=True),
        "softcap": Case(heads=7, groups=1, length=LENGTH, softcap=0.7),
        "bias-of-uneven-heads": Case(heads=6, groups=2, length=30, bias=(6, 30, 30), sinks=True),
    }
    named |= checks.BIASED
    checks.assert_at_parity(gloo_pool, unaligned(), named, 4, platform=True)


@settings(max_examples=6, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(4, 40)), min_size=6, max_size=6
    ),
    kv_cache=st.sampled_from(["none", "half", "full"]),
)
def test_any_heads_groups_and_lengths_are_at_parity(
    gloo_pool: GlooPool, shapes: list[tuple[int, int, int]], kv_cache: str
) -> None:
    cases = [
        Case(heads=groups * each, groups=groups, length=length)
        for groups, each, length in shapes
        if groups * each >= 4
    ]
    named = {str(case): case for case in cases}
    checks.assert_at_parity(gloo_pool, unaligned(kv_cache=kv_cache), named, 4)


def test_no_rank_holds_all_heads_of_the_full_sequence(gloo_pool: GlooPool) -> None:
    """Relative to one tensor of the rank with the most heads."""
    case = Case(length=509, heads=13, groups=13, width=16, value_width=16)
    share = case.length * (case.batch or 1) * 4 * 16 * ITEM
    found = gloo_pool.run(jobs.attend, 4, unaligned(), [case], True)
    gathering = gloo_pool.run(jobs.attend_whole_of, 4, case)
    peaks = [o.peak_bytes / share for o in (*(o for (o,) in found), *gathering)]
    assert max(peaks[:4]) <= 25 < min(peaks[4:]), peaks
