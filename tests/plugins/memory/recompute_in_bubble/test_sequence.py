"""What real ranks do, in order, and how long that takes on a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.ring_simulator import Network, makespan
from tests.support.pipeline_record import Event, as_trace, computed, record, waits_after_recomputing

NAME: Final = "recompute-in-bubble"
DURATIONS: Final = {"F": 1.0, "B": 2.0, "R": 1.0, "r": 1.0}
INSTANT: Final = Network(per_node=8, inside=1e12, between=1e12)


def most_at_once(events: Sequence[Event]) -> int:
    """Return how many forwards have their activations at the same time: those that run, unless they
    are recomputed later, and those that are recomputed."""
    later = {event[1:] for event in events if event[0] in "Rr"}
    has, most = set[tuple[int, int]](), 0
    for kind, *which in events:
        if kind in ("R", "r") or (kind == "F" and tuple(which) not in later):
            has.add(tuple(which))
        elif kind == "B":
            has.remove(tuple(which))
        most = max(most, len(has))
    return most


@pytest.mark.parametrize(
    ("pipeline", "kept", "in_flight", "work", "longer"),
    [(2, [4, 3], [5, 3], 24, 28), (4, [8, 8, 7, 5], [11, 9, 7, 5], 48, 61)],
)
def test_the_surplus_is_recomputed_in_bubbles(
    gloo_pool: GlooPool,
    pipeline: int,
    kept: list[int],
    in_flight: list[int],
    work: int,
    longer: int,
) -> None:
    """With two groups of micro-batches, a step takes as long as if all forwards were kept, with
    fewer of them on the first ranks. Recomputed in backward, they would take longer."""
    values = {
        **DENSE,
        "model.num_layers": 2 * pipeline,
        "train.global_batch_size": 2 * pipeline,
        "parallel.pipeline_model_parallel_size": pipeline,
        "parallel.virtual_pipeline_model_parallel_size": 2,
        "parallel.overlap_p2p_comm": True,
        "parallel.batch_p2p_comm": False,
    }
    plain, ours = (gloo_pool.run(record, pipeline, values, names) for names in ((), (NAME,)))
    assert [*map(most_at_once, plain)] == in_flight
    assert [*map(most_at_once, ours)] == kept
    assert all(map(waits_after_recomputing, ours))
    if pipeline == 2:
        assert [*map(computed, ours)] == [
            "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 R0.2 B1.2 B1.3 B0.2 B0.3",
            "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
        ]
    without, simulated = (
        makespan([as_trace(events, DURATIONS) for events in ranks], INSTANT, 1.0)
        for ranks in (plain, ours)
    )
    assert without == pytest.approx(work + (pipeline - 1) * (1 + 2), abs=1e-6)
    assert simulated == pytest.approx(without, abs=1e-6)
    assert makespan(_in_backward(ours), INSTANT, 1.0) == pytest.approx(longer, abs=1e-6)


def _in_backward(ranks: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Return the traces with each recomputation moved to its backward."""
    traces = []
    for events in ranks:
        moved: list[Event] = []
        for event in events:
            if event[0] == "B" and ("R", *event[1:]) in events:
                moved.append(("r", *event[1:]))
            moved += [event] if event[0] != "R" else []
        traces.append(as_trace(moved, DURATIONS))
    return traces
