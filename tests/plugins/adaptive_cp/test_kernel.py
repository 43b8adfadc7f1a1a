"""Rounds of messages on 2 and 4 ranks against attention on the whole sequence, in float64."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugins.adaptive_cp import AdaptiveCp, AdaptiveCpConfig
from ascend_run.plugins.adaptive_cp.kernel import AdaptiveKernel
from tests.support import ring_checks as checks
from tests.support.ring_checks import BIASED, CASES, OWN, PLATFORM
from tests.support.ring_formula import Case, FormulaKernel

ADAPTIVE = AdaptiveCp(AdaptiveCpConfig())
CONTIGUOUS = AdaptiveCp(AdaptiveCpConfig(remap=False))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("plugin", [ADAPTIVE, CONTIGUOUS], ids=["remapped", "in order"])
def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool, plugin: AdaptiveCp, world_size: int
) -> None:
    checks.assert_at_parity(gloo_pool, plugin, CASES | OWN, world_size)


def test_so_they_are_by_the_platforms_kernel_with_any_bias(gloo_pool: GlooPool) -> None:
    checks.assert_at_parity(gloo_pool, ADAPTIVE, PLATFORM | BIASED, 4, platform=True)


@settings(max_examples=5, deadline=None)
@given(
    drawn=st.lists(checks.cases(multiple=16), min_size=4, max_size=4),
    chunks=st.sampled_from([2, 4]),
    remap=st.booleans(),
)
def test_any_problem_is_at_parity(
    gloo_pool: GlooPool, drawn: list[Case], chunks: int, remap: bool
) -> None:
    plugin = AdaptiveCp(AdaptiveCpConfig(chunks_per_rank=chunks, remap=remap))
    checks.assert_at_parity(gloo_pool, plugin, {str(case): case for case in drawn}, 4)


def test_in_bfloat16_it_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool,
) -> None:
    checks.assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
        gloo_pool, ADAPTIVE, 4
    )


def test_every_block_drops_other_places_and_backward_replays_them(gloo_pool: GlooPool) -> None:
    """Without a mask a rank has one block with its own keys, and one for each other rank's."""
    case = Case(mask=checks.FREE)
    checks.assert_every_block_drops_other_places_and_backward_replays_them(
        gloo_pool, CONTIGUOUS, 4, case
    )


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    with pytest.raises(HookError, match=r"adaptive-cp .* Unfit") as refused:
        # The kernel is refused before what stands beside it is read.
        AdaptiveKernel(Unfit(frozenset({"q"})), None, None)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3
