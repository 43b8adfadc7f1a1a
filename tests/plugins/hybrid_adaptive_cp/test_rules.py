"""Groups, cut and refusals, before torch is imported."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import Claim, FieldSection, Layout, Numerics, RunConfig
from ascend_run.plugins.hybrid_adaptive_cp import HybridAdaptiveCp, HybridAdaptiveCpConfig
from tests.support.ring_jobs import run_of


def problems(degree: int, *, cp: int, tp: int = 1, heads: int = 8) -> list[str]:
    config = RunConfig(
        model=FieldSection({"num_attention_heads": heads}),
        parallel=FieldSection({"context_parallel_size": cp}),
    )
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig(ulysses_degree=degree))
    return [
        *plugin.ascend_check(config=config, layout=Layout(world_size=cp * tp, cp=cp, tp=tp)),
    ]


def test_neighbours_exchange_heads_and_groups_are_a_degree_apart() -> None:
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig())
    assert plugin.ascend_process_groups(layout=Layout(world_size=8, cp=8)) == {
        "hybrid_adaptive_cp_heads": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "hybrid_adaptive_cp_keys": [(0, 2, 4, 6), (1, 3, 5, 7)],
    }
    assert plugin.ascend_process_groups(layout=Layout(world_size=3, cp=3)) == {}


def test_the_cut_is_dealt_to_the_groups_and_in_order_among_neighbours() -> None:
    partition = HybridAdaptiveCp(HybridAdaptiveCpConfig()).ascend_sequence_partition(
        config=run_of(4)
    )
    assert partition is not None
    assert [[*partition.chunks(32, rank, 4)] for rank in range(4)] == [
        [(0, 8)],
        [(24, 32)],
        [(8, 16)],
        [(16, 24)],
    ]


@pytest.mark.parametrize(
    ("degree", "sizes", "words"),
    [
        (3, {"cp": 4}, ("ulysses_degree=3", "size=4", "1, 2 or 4")),
        (4, {"cp": 8, "tp": 2, "heads": 12}, ("12 heads", "tp=2", "ulysses_degree=4", "1 or 2")),
    ],
    ids=["degree", "heads"],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    degree: int, sizes: dict[str, int], words: tuple[str, ...]
) -> None:
    (problem,) = problems(degree, **sizes)
    for word in words:
        assert word in problem


def test_it_owns_the_sequence_exchange_and_one_rank_needs_none() -> None:
    assert problems(4, cp=8, tp=2) == problems(4, cp=1) == []
    manifest = HybridAdaptiveCp.manifest
    assert manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert manifest.numerics is Numerics.ROUNDING
    assert manifest.idle is not None
    assert not manifest.idle.holds(run_of(2))
