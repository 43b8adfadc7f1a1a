"""Exchange and ring on 2 and 4 ranks against attention on the whole sequence, in float64."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.hybrid_cp import HybridCp, HybridCpConfig
from ascend_run.plugins.hybrid_cp.kernel import HybridKernel
from tests.support import ring_checks as checks
from tests.support.ring_checks import BIASED, CASES, FREE, OWN, PLATFORM
from tests.support.ring_formula import Case, FormulaKernel

FEW = {
    "grouped": Case(groups=2, width=6, value_width=3),
    "multi-query": Case(groups=1),
    "not-causal": Case(mask=FREE, sinks=True),
    "documents": Case(mask=c.Mask(document_ends=checks.DOCUMENTS)),
    "slopes": Case(slopes=True),
}
OPTIONS = {
    "two": (HybridCpConfig(), CASES | OWN),
    "contiguous": (HybridCpConfig(cut="contiguous"), FEW),
    "keeping-keys": (HybridCpConfig(kv_cache="half"), FEW),
    "keeping-all": (HybridCpConfig(kv_cache="full"), FEW),
    "a-double-ring-alone": (HybridCpConfig(ulysses_degree=1, window=2), FEW),
    "a-double-ring-of-one": (HybridCpConfig(ulysses_degree=2, window=1), FEW),
    "heads-alone": (HybridCpConfig(ulysses_degree=4), FEW),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool, options: str
) -> None:
    config, named = OPTIONS[options]
    checks.assert_at_parity(gloo_pool, HybridCp(config), named, 4)


@pytest.mark.parametrize("degree", [1, 2])
def test_so_they_are_on_two_ranks(gloo_pool: GlooPool, degree: int) -> None:
    plugin = HybridCp(HybridCpConfig(ulysses_degree=degree))
    checks.assert_at_parity(gloo_pool, plugin, CASES, 2)


def test_so_they_are_by_the_platforms_kernel(gloo_pool: GlooPool) -> None:
    plugin = HybridCp(HybridCpConfig())
    checks.assert_at_parity(gloo_pool, plugin, CASES | PLATFORM | BIASED, 4, platform=True)


@settings(max_examples=5, deadline=None)
@given(
    drawn=st.lists(checks.cases(), min_size=4, max_size=4),
    kv_cache=st.sampled_from(["none", "half", "full"]),
    cut=st.sampled_from(["zig-zag", "contiguous"]),
)
def test_any_problem_is_at_parity(
    gloo_pool: GlooPool, drawn: list[Case], kv_cache: KvCache, cut: Literal["zig-zag", "contiguous"]
) -> None:
    plugin = HybridCp(HybridCpConfig(kv_cache=kv_cache, cut=cut))
    checks.assert_at_parity(gloo_pool, plugin, {str(case): case for case in drawn}, 4)


def test_in_bfloat16_it_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool,
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, HybridCp(HybridCpConfig()), 4
    )


def test_every_block_drops_other_places_and_backward_replays_them(gloo_pool: GlooPool) -> None:
    plugin = HybridCp(HybridCpConfig())
    checks.assert_every_block_drops_other_places_and_backward_replays_them(gloo_pool, plugin, 2)


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    with pytest.raises(HookError, match=r"hybrid-cp .* Unfit") as refused:
        HybridKernel(Unfit(frozenset({"q"})), None, None, None, None)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3
