"""Groups, cut and refusals, before torch is imported."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api import Claim, FieldSection, Layout, Numerics, RunConfig
from ascend_run.plugins.hybrid_cp import HybridCp, HybridCpConfig
from tests.support.ring_jobs import run_of


def problems(plugin: HybridCp, *, cp: int, tp: int = 1, heads: int = 8) -> list[str]:
    config = RunConfig(
        model=FieldSection({"num_attention_heads": heads, "num_layers": 2}),
        parallel=FieldSection({"context_parallel_size": cp}),
    )
    layout = Layout(world_size=cp * tp, cp=cp, tp=tp)
    return [*plugin.ascend_check(config=config, layout=layout)]


def test_neighbours_exchange_heads_and_the_ring_is_a_degree_apart() -> None:
    plugin = HybridCp(HybridCpConfig(ulysses_degree=2, window=2))
    layout = Layout(world_size=8, cp=8)
    assert plugin.ascend_process_groups(layout=layout) == {
        "hybrid_cp_heads": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "hybrid_cp_window": [(0, 2), (4, 6), (1, 3), (5, 7)],
        "hybrid_cp_windows": [(0, 4), (2, 6), (1, 5), (3, 7)],
    }
    one_window = HybridCp(HybridCpConfig()).ascend_process_groups(layout=layout)
    assert one_window["hybrid_cp_window"] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_the_cut_is_zig_zag_over_the_ring_and_in_order_among_neighbours() -> None:
    partition = HybridCp(HybridCpConfig()).ascend_sequence_partition(config=run_of(4))
    assert partition is not None
    assert [[*partition.chunks(32, rank, 4)] for rank in range(4)] == [
        [(0, 8)],
        [(24, 32)],
        [(8, 16)],
        [(16, 24)],
    ]
    assert [*partition.chunks(64, 0, 8)] == [(0, 8)]
    assert [*partition.chunks(64, 1, 8)] == [(56, 64)]


@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ({"ulysses_degree": 3}, {"cp": 4}, ("ulysses_degree=3", "size=4", "1, 2 or 4")),
        (
            {"ulysses_degree": 4},
            {"cp": 8, "tp": 2, "heads": 12},
            ("12 heads", "tp=2", "ulysses_degree=4", "1 or 2"),
        ),
        ({"window": 3}, {"cp": 8}, ("window=3", "ring of 4", "1, 2 or 4")),
    ],
    ids=["degree", "heads", "window"],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    options: dict[str, int], sizes: dict[str, int], words: tuple[str, ...]
) -> None:
    (problem,) = problems(HybridCp(HybridCpConfig(**options)), **sizes)
    for word in words:
        assert word in problem


def test_sizes_that_divide_are_accepted_and_one_rank_needs_none() -> None:
    assert problems(HybridCp(HybridCpConfig(ulysses_degree=4)), cp=8, tp=2) == []
    assert problems(HybridCp(HybridCpConfig(ulysses_degree=4)), cp=1) == []


def test_it_owns_the_sequence_exchange_and_changes_rounding_only() -> None:
    assert HybridCp.manifest.claims == (Claim.SEQUENCE_EXCHANGE,)
    assert HybridCp.manifest.numerics is Numerics.ROUNDING
    assert HybridCp.manifest.idle is not None
    assert not HybridCp.manifest.idle.holds(run_of(2))
