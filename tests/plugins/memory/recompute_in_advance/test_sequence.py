"""What real ranks do, in order, and how long that takes on a simulated clock."""

from __future__ import annotations

from typing import Final

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.ring_simulator import Network, makespan
from tests.support.pipeline_record import as_trace, computed, record, waits_after_recomputing

CHUNKS: Final = {
    "model.num_layers": 4,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.virtual_pipeline_model_parallel_size": 2,
    "parallel.overlap_p2p_comm": True,
    "parallel.batch_p2p_comm": False,
}
DURATIONS: Final = {"F": 1.0, "B": 2.0, "R": 1.0, "r": 1.0}
INSTANT: Final = Network(per_node=8, inside=1e12, between=1e12)


@pytest.mark.needs_plugins("recompute")
def test_a_chunk_is_recomputed_before_its_gradient_is_waited_for(gloo_pool: GlooPool) -> None:
    """``F`` forward, ``B`` backward, ``R`` recomputed in advance, ``r`` in backward; chunk and
    micro-batch. In the last backwards a rank's gradient is on the way as long as a backward takes,
    no longer a backward and a recomputation."""
    values = {**DENSE, **CHUNKS}
    plain = gloo_pool.run(record, 2, values, ("recompute",))
    ours = gloo_pool.run(record, 2, values, ("recompute", "recompute-in-advance"))

    first, last = map(computed, ours)
    assert first == (
        "F0.0 F0.1 F1.0 F1.1 F0.2 R1.0 B1.0 F0.3 R1.1 B1.1 F1.2 R0.0 B0.0 F1.3 R0.1 B0.1 "
        "R1.2 B1.2 R1.3 B1.3 R0.2 B0.2 R0.3 B0.3"
    )
    assert last == (
        "F0.0 F0.1 F1.0 r1.0 B1.0 F1.1 r1.1 B1.1 F0.2 R0.0 B0.0 F0.3 R0.1 B0.1 "
        "F1.2 r1.2 B1.2 F1.3 r1.3 B1.3 R0.2 B0.2 R0.3 B0.3"
    )
    assert [computed(rank) for rank in plain] == [first.replace("R", "r"), last.replace("R", "r")]
    assert all(map(waits_after_recomputing, ours))
    seconds = [
        makespan([as_trace(events, DURATIONS) for events in ranks], INSTANT, 1.0)
        for ranks in (plain, ours)
    ]
    work = 4 * 2 * (1 + 2 + 1)
    assert seconds == pytest.approx([work + 1 + (2 + 1), work + 1 + 2], abs=1e-6)
