"""The peak of an update is as expected with each optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from benchmarks.memory_case import Case
from benchmarks.memory_prediction import compare

SMALLER, LARGER = {"model.vocab_size": 6400}, {"model.vocab_size": 19200}
"""Tables of fewer elements than a chunk of a CPU, and of more than two of them."""
NEAREST = {"plugins.o2-bf16-optimizer.stochastic_rounding": False, "model.vocab_size": 40000}
CASES = (
    ("ema-adamw", LARGER),
    ("low-precision-optimizer", SMALLER),
    ("low-precision-optimizer", LARGER),
    ("o2-bf16-optimizer", LARGER),
    ("o2-bf16-optimizer", NEAREST),
    ("reuse-fp32-param", SMALLER),
    ("reuse-fp32-param", LARGER),
    ("swap-optimizer", LARGER),
    ("virtual-optimizer", LARGER),
)
LITTLE = {
    "train.precision": "bf16",
    "train.global_batch_size": 1,
    "train.loss_chunk_bytes": 2**17,
}
TABLES = {**DENSE, **LITTLE}
"""The embedding and the output layer are nearly all parameters, and activations nothing."""
DENSE_MATRICES = {
    **DENSE,
    **LITTLE,
    "model.num_layers": 1,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 768,
}
MOE_MATRICES = {**MOE, **LITTLE, "model.num_layers": 1, "model.hidden_size": 64}
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
MATRICES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "dense": (1, DENSE_MATRICES),
    "dense, float32": (
        1,
        {**DENSE_MATRICES, "train.precision": "fp32", "plugins.muon.ns_dtype": "float32"},
    ),
    "experts": (1, {**MOE_MATRICES, "model.moe_ffn_hidden_size": 2048}),
    "tp2": (2, {**DENSE_MATRICES, **TP}),
    "expert tp2": (
        2,
        {
            **MOE_MATRICES,
            **TP,
            "parallel.expert_tensor_parallel_size": 2,
            "model.moe_ffn_hidden_size": 1024,
        },
    ),
}
"""Matrices of the layers are nearly all parameters."""


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


@pytest.mark.needs_plugins("muon")
@pytest.mark.parametrize("name", MATRICES)
def test_an_update_of_matrices_takes_what_was_expected(gloo_pool: GlooPool, name: str) -> None:
    ranks, values = MATRICES[name]
    for row in compare(Case(name=name, ranks=ranks, plugins=("muon",), values=values), gloo_pool):
        assert row["moment"] == "update"
        assert abs(row["off"]) <= 0.02, row
