"""Exposed communication of a recorded step on the simulated clock, against lora alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.ring_simulator import Event, Network, compute_of, exposed, makespan
from tests.support.collective_trace import record

SIZES: Final = {
    **DENSE,
    "model.num_layers": 1,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 704,
    "model.kv_channels": 32,
    "model.vocab_size": 64,
    "data.seq_length": 256,
    "train.global_batch_size": 1,
    "parallel.tensor_model_parallel_size": 2,
    "plugins.lora.export": False,
}
FEWER: Final = 0.25
"""Least share of lora's exposed communication that cc-lora overlaps or leaves out."""


LOADS: Final = (0.1, 0.3, 0.5, 1.0, 3.0)
"""What lora communicates in, in units of its computation."""
RANK: Final = 8
NARROW: Final = {part * RANK * 4 * 256 for part in (1, 2, 3)}
"""Bytes of the outputs of A for all tokens: of a linear, of gate and up, of queries to values."""

Ranks = list[list[Event]]
Recorded = Callable[[bool], Mapping[str, Ranks]]


def traces(pool: GlooPool, sequence: bool) -> Mapping[str, Ranks]:
    values = {**SIZES, "plugins.lora.rank": RANK, "parallel.sequence_parallel": sequence}
    return {
        name: pool.run(record, 2, values, plugins, timeout=200)
        for name, plugins in {"lora": ("lora",), "cc-lora": ("lora", "cc-lora")}.items()
    }


@pytest.fixture(scope="module")
def recorded(gloo_pool: GlooPool) -> Recorded:
    """Return a function that records a step of each, once."""
    return functools.cache(partial(traces, gloo_pool))


def sent(events: list[Event]) -> float:
    return sum(event[3] for event in events if event[0] == "send")


def without_waits(events: list[Event], sizes: Collection[float]) -> list[Event]:
    """Leave out the waits for messages of these numbers of bytes."""
    these = {e[1] for e in events if e[0] in ("send", "recv") and e[3] in sizes}
    return [e for e in events if e[0] != "wait" or e[1] not in these]


@pytest.mark.parametrize(("sequence", "most"), [(True, 1.0), (False, 0.5)])
def test_a_quarter_less_communication_is_exposed(
    recorded: Recorded, sequence: bool, most: float
) -> None:
    """On networks on which lora communicates for up to ``most`` times its computation, and never
    more than lora on slower ones: what overlaps is at most the computation."""
    found = recorded(sequence)
    plain_bytes = sent(found["lora"][0])
    assert sent(found["cc-lora"][0]) <= plain_bytes
    speed = compute_of(found["lora"])
    for load in LOADS:
        network = Network(per_node=2, inside=plain_bytes / load, between=1.0)
        ours, plain = (exposed(found[name], network, speed) for name in ("cc-lora", "lora"))
        assert plain == pytest.approx(load)  # lora overlaps nothing
        assert ours <= (1 - FEWER if load <= most else 1.0) * plain, load


@pytest.mark.parametrize(("sequence", "number"), [(True, 6), (False, 4)])
def test_no_step_waits_for_the_adapters_collectives(
    recorded: Recorded, sequence: bool, number: int
) -> None:
    """It ends when it would if it awaited those of the linears alone; lora's step ends later."""
    found = recorded(sequence)
    sizes = {size / 2 if sequence else size for size in NARROW}  # a ring sends half of the rows
    speed, all_bytes = compute_of(found["lora"]), sent(found["lora"][0])
    assert sum(e[0] == "send" and e[3] in sizes for e in found["cc-lora"][0]) == number
    for load in LOADS:
        network = Network(per_node=2, inside=all_bytes / load, between=1.0)
        waited = {
            name: makespan(ranks, network, speed)
            - makespan([without_waits(events, sizes) for events in ranks], network, speed)
            for name, ranks in found.items()
        }
        assert waited["cc-lora"] == pytest.approx(0.0, abs=1e-12), load
        assert waited["lora"] > 0.02 * load
