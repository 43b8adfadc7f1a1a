"""Groups, partition and errors, before torch is imported."""

from __future__ import annotations

from ascend_run.plugin_api import Layout
from ascend_run.plugins.sequence.hybrid_adaptive_cp import HybridAdaptiveCp, HybridAdaptiveCpConfig
from tests.support.ring_jobs import run_of


def test_neighbours_exchange_heads_and_groups_are_a_degree_apart() -> None:
    plugin = HybridAdaptiveCp(HybridAdaptiveCpConfig())
    assert plugin.ascend_process_groups(config=run_of(8), layout=Layout(world_size=8, cp=8)) == {
        "hybrid_adaptive_cp_heads": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "hybrid_adaptive_cp_keys": [(0, 2, 4, 6), (1, 3, 5, 7)],
    }
    assert plugin.ascend_process_groups(config=run_of(3), layout=Layout(world_size=3, cp=3)) == {}


def test_chunks_go_to_groups_by_document_and_to_neighbours_in_order() -> None:
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
