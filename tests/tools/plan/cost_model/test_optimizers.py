"""The peak of an update is as expected with each optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from benchmarks.memory_layouts import Case
from benchmarks.memory_prediction import compare

SMALLER, LARGER = {"model.vocab_size": 6400}, {"model.vocab_size": 19200}
"""Tables of fewer elements than a chunk of a CPU, and of more than two of them."""
NEAREST = {"plugins.o2-bf16-optimizer.stochastic_rounding": False, "model.vocab_size": 40000}
CASES = (
    ("ema-adamw", LARGER),
    ("low-precision-optimizer", SMALLER),
    ("low-precision-optimizer", LARGER),
    ("muon", LARGER),
    ("o2-bf16-optimizer", LARGER),
    ("o2-bf16-optimizer", NEAREST),
    ("reuse-fp32-param", SMALLER),
    ("reuse-fp32-param", LARGER),
    ("swap-optimizer", LARGER),
    ("virtual-optimizer", LARGER),
)
TABLES = {
    **DENSE,
    "train.precision": "bf16",
    "train.global_batch_size": 1,
    "train.loss_chunk_bytes": 2**17,
}
"""The embedding and the output layer are nearly all parameters, and activations nothing."""


@pytest.mark.parametrize(
    ("plugin", "values"),
    [pytest.param(*case, marks=pytest.mark.needs_plugins(case[0])) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else str(value["model.vocab_size"]),
)
def test_an_update_takes_what_was_expected(
    gloo_pool: GlooPool, plugin: str, values: dict[str, Any]
) -> None:
    case = Case(name=plugin, plugins=(plugin,), values={**TABLES, **values})
    (row,) = compare(case, gloo_pool)
    assert row["moment"] == "update"
    assert abs(row["off"]) <= 0.02, row
