"""The ring on 1, 2 and 4 ranks against attention on the whole sequence, in float64."""

from __future__ import annotations

from typing import Literal

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.ops.attention.ring_attention.cut import ZigZag
from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.ring_attention import RingAttention, RingAttentionConfig
from ascend_run.plugins.ring_attention.kernel import RingKernel
from tests.support import ring_checks as checks
from tests.support import ring_jobs as jobs
from tests.support.ring_checks import BIASED, CASES, FREE, OWN, PLATFORM
from tests.support.ring_formula import Case, FormulaKernel

OPTIONS = {
    "zig-zag": (RingAttentionConfig(), CASES | OWN),
    "contiguous": (
        RingAttentionConfig(cut="contiguous"),
        {
            "grouped": Case(groups=2),
            "not-causal": Case(mask=FREE),
            "window": Case(mask=c.Mask(window=(5, 0))),
            "documents": Case(mask=c.Mask(document_ends=checks.DOCUMENTS)),
            "slopes": Case(slopes=True),
        },
    ),
    "keeping-keys": (
        RingAttentionConfig(kv_cache="half"),
        {
            "grouped": Case(groups=2, width=6, value_width=3),
            "inner-reads-no-keys": OWN["inner-saves-keys-in-a-window"],
        },
    ),
    "keeping-all": (
        RingAttentionConfig(kv_cache="full"),
        {"grouped": Case(groups=2), "window": Case(mask=c.Mask(window=(9, 0)))},
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("platform", [False, True], ids=["formula", "platform"])
@pytest.mark.parametrize("options", OPTIONS)
def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool, options: str, platform: bool, world_size: int
) -> None:
    config, named = OPTIONS[options]
    if platform:
        named = {name: case for name, case in named.items() if name not in OWN} | PLATFORM | BIASED
    checks.assert_at_parity(gloo_pool, RingAttention(config), named, world_size, platform)


@settings(max_examples=5, deadline=None)
@given(
    drawn=st.lists(checks.cases(), min_size=4, max_size=4),
    kv_cache=st.sampled_from(["none", "half", "full"]),
    cut=st.sampled_from(["zig-zag", "contiguous"]),
)
def test_any_problem_is_at_parity(
    gloo_pool: GlooPool, drawn: list[Case], kv_cache: KvCache, cut: Literal["zig-zag", "contiguous"]
) -> None:
    plugin = RingAttention(RingAttentionConfig(kv_cache=kv_cache, cut=cut))
    checks.assert_at_parity(gloo_pool, plugin, {str(case): case for case in drawn}, 4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_in_bfloat16_it_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool, world_size: int
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, RingAttention(RingAttentionConfig()), world_size
    )


def test_where_the_caller_says_that_its_part_begins_does_not_matter(gloo_pool: GlooPool) -> None:
    """The mask speaks of the whole sequence."""
    cases = [Case(), Case(mask=c.Mask(query_start=8, key_start=8))]
    for first, second in gloo_pool.run(jobs.attend, 2, RingAttention(RingAttentionConfig()), cases):
        assert torch.equal(first.out, second.out)


def test_every_block_drops_other_places_and_backward_replays_them(gloo_pool: GlooPool) -> None:
    plugin = RingAttention(RingAttentionConfig())
    checks.assert_every_block_drops_other_places_and_backward_replays_them(gloo_pool, plugin, 4)
    four = Case(mask=c.Mask(document_ends=(8, 16, 24)))  # a call each, but one at the first step
    checks.assert_every_block_drops_other_places_and_backward_replays_them(
        gloo_pool, plugin, 1 + 3 * 4, four
    )


@settings(max_examples=4, deadline=None)
@given(case=checks.cases(), probability=st.floats(0.05, 0.6), size=st.sampled_from([2, 4]))
def test_every_gradient_is_that_of_what_was_kept(
    gloo_pool: GlooPool, case: Case, probability: float, size: int
) -> None:
    plugin = RingAttention(RingAttentionConfig())
    case = attrs.evolve(case, dropout=probability)
    checks.assert_dropout_is_that_of_the_formula(gloo_pool, plugin, case, size)


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    with pytest.raises(HookError, match="Unfit") as refused:
        RingKernel(Unfit(frozenset({"q", "out"})), None, ZigZag())  # type: ignore[arg-type]
    assert len(refused.value.problems) == 2


def test_it_takes_what_the_inner_kernel_takes_and_sinks_too() -> None:
    kernel = RingKernel(jobs.platform_kernel(), None, ZigZag())  # type: ignore[arg-type]
    assert kernel.features.window
    assert kernel.features.documents
    assert kernel.features.bias
    assert not RingKernel(FormulaKernel(), None, ZigZag()).features.bias  # type: ignore[arg-type]
    assert RingKernel(FormulaKernel(), None, ZigZag()).features.sinks  # type: ignore[arg-type]
