"""Communication of Ulysses in a full run; not required of other plugins."""

from __future__ import annotations

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES = 2, 4
MESSAGES = 4
"""Of one layer and micro-batch: q, k and v; out; its gradient; the gradients of q, k and v."""


@pytest.mark.exhaustive(
    by=lambda model, layout: [model] if (model, layout) == ("dense", {"cp": 2}) else []
)
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 4}, {"cp": 2, "dp": 2}], ids=str)
def test_a_layer_takes_four_collectives_per_micro_batch(
    parity: Parity, layout: dict[str, int], model: str
) -> None:
    micro_batches = MICRO_BATCHES // layout.get("dp", 1)
    for outcome in parity("ulysses", model=model, layout=layout):
        assert outcome.collectives["alltoall_base_"] == LAYERS * micro_batches * MESSAGES
