"""Gathered keys on 1, 2 and 4 ranks against attention on the whole sequence, in float64."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.attention.kv_cache import KvCache
from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.kv_allgather_cp import KvAllgatherCp, KvAllgatherCpConfig
from ascend_run.plugins.kv_allgather_cp.kernel import GatheringKernel
from tests.support import ring_checks as checks
from tests.support.ring_checks import BIASED, CASES, FREE, OWN, PLATFORM
from tests.support.ring_formula import Case, FormulaKernel

FEW = {
    "grouped": Case(groups=2, width=6, value_width=3),
    "not-causal": Case(mask=FREE, sinks=True),
    "window": Case(mask=c.Mask(window=(5, 0))),
    "documents": Case(mask=c.Mask(document_ends=checks.DOCUMENTS)),
    "slopes": Case(slopes=True, sinks=True),
    **OWN,
}
OPTIONS = {
    "contiguous": (KvAllgatherCpConfig(cut="contiguous"), FEW),
    "half, heads by three": (KvAllgatherCpConfig(kv_cache="half", groups_at_once=3), FEW),
    "full": (KvAllgatherCpConfig(kv_cache="full"), FEW),
    "full, heads one by one": (KvAllgatherCpConfig(kv_cache="full", groups_at_once=1), FEW),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool, world_size: int
) -> None:
    plugin = KvAllgatherCp(KvAllgatherCpConfig())
    named = FEW if world_size == 1 else CASES | OWN
    checks.assert_at_parity(gloo_pool, plugin, named, world_size)


@pytest.mark.parametrize("options", OPTIONS)
def test_its_options_change_no_number(gloo_pool: GlooPool, options: str) -> None:
    config, named = OPTIONS[options]
    checks.assert_at_parity(gloo_pool, KvAllgatherCp(config), named, 4)


def test_so_it_is_by_the_platforms_kernel_with_any_bias(gloo_pool: GlooPool) -> None:
    """Heads one by one: each part has its share of biases, slopes and sinks."""
    named = {name: case for name, case in FEW.items() if name not in OWN} | PLATFORM | BIASED
    for at_once in (None, 1):
        plugin = KvAllgatherCp(KvAllgatherCpConfig(groups_at_once=at_once))
        checks.assert_at_parity(gloo_pool, plugin, named, 4, platform=True)


@settings(max_examples=5, deadline=None)
@given(
    drawn=st.lists(checks.cases(), min_size=4, max_size=4),
    kv_cache=st.sampled_from(["none", "half", "full"]),
    cut=st.sampled_from(["zig-zag", "contiguous"]),
    at_once=st.sampled_from([None, 1, 3]),
)
def test_any_problem_is_at_parity(
    gloo_pool: GlooPool,
    drawn: list[Case],
    kv_cache: KvCache,
    cut: Literal["zig-zag", "contiguous"],
    at_once: int | None,
) -> None:
    options = KvAllgatherCpConfig(kv_cache=kv_cache, cut=cut, groups_at_once=at_once)
    named = {str(case): case for case in drawn}
    checks.assert_at_parity(gloo_pool, KvAllgatherCp(options), named, 4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_in_bfloat16_it_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool, world_size: int
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, KvAllgatherCp(KvAllgatherCpConfig(groups_at_once=1)), world_size
    )


def test_every_block_drops_other_places_and_backward_replays_them(gloo_pool: GlooPool) -> None:
    """Two heads at a time of four: each its own keys, all before both chunks, and those between."""
    plugin = KvAllgatherCp(KvAllgatherCpConfig(groups_at_once=2))
    case = Case(mask=FREE)
    checks.assert_every_block_drops_other_places_and_backward_replays_them(
        gloo_pool, plugin, 2 * 2, case
    )


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    with pytest.raises(HookError, match=r"kv-allgather-cp .* Unfit") as refused:
        GatheringKernel(Unfit(frozenset({"q"})), None, None)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3
