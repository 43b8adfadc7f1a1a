"""Groups, partition and errors, before torch is imported."""

from __future__ import annotations

from ascend_run.plugin_api import Layout
from ascend_run.plugins.sequence.hybrid_cp import HybridCp, HybridCpConfig
from tests.support.ring_jobs import run_of


def test_neighbours_exchange_heads_and_the_ring_is_a_degree_apart() -> None:
    plugin = HybridCp(HybridCpConfig(ulysses_degree=2, window=2))
    layout = Layout(world_size=8, cp=8)
    assert plugin.ascend_process_groups(config=run_of(8), layout=layout) == {
        "hybrid_cp_heads": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "hybrid_cp_window": [(0, 2), (4, 6), (1, 3), (5, 7)],
        "hybrid_cp_windows": [(0, 4), (2, 6), (1, 5), (3, 7)],
    }
    one_window = HybridCp(HybridCpConfig()).ascend_process_groups(config=run_of(8), layout=layout)
    assert one_window["hybrid_cp_window"] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_chunks_are_zig_zag_over_the_ring_and_in_order_among_neighbours() -> None:
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
