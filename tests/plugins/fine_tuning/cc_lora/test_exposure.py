"""Exposed communication of a recorded step on the simulated clock, against lora alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.ring_simulator import Event, Network, compute_of, exposed
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


def traces(pool: GlooPool, sequence: bool) -> Mapping[str, list[list[Event]]]:
    values = {**SIZES, "parallel.sequence_parallel": sequence}
    return {
        name: pool.run(record, 2, values, plugins, timeout=200)
        for name, plugins in {"lora": ("lora",), "cc-lora": ("lora", "cc-lora")}.items()
    }


@pytest.mark.parametrize(("sequence", "most"), [(True, 1.0), (False, 0.5)])
def test_a_quarter_less_communication_is_exposed(
    gloo_pool: GlooPool, sequence: bool, most: float
) -> None:
    """On networks on which lora communicates for up to ``most`` times its computation, and never
    more than lora on slower ones: what overlaps is at most the computation."""
    found = traces(gloo_pool, sequence)
    sent = {name: sum(e[3] for e in ranks[0] if e[0] == "send") for name, ranks in found.items()}
    assert sent["cc-lora"] <= sent["lora"]
    speed = compute_of(found["lora"])
    for load in (0.1, 0.3, 0.5, 1.0, 3.0):
        network = Network(per_node=2, inside=sent["lora"] / load, between=1.0)
        ours, plain = (exposed(found[name], network, speed) for name in ("cc-lora", "lora"))
        assert plain == pytest.approx(load)  # lora overlaps nothing
        assert ours <= (1 - FEWER if load <= most else 1.0) * plain, load
