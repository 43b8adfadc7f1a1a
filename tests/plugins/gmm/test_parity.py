"""Runs with gmm against the run without it, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from ascend_run.plugin_api.testing.parity import Parity

LAYERS, MICRO_BATCHES, EXPERTS = 2, 4, 4


@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "dp": 2, "ep": 2}], ids=str
)
@pytest.mark.parametrize("backend", ["auto", "bmm"])
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, backend: str, layout: dict[str, int]
) -> None:
    parity("gmm", model="moe", layout=layout, options={"plugins.gmm.backend": backend})


def test_its_products_are_the_ones_that_run(parity: Parity) -> None:
    (outcome,) = parity("gmm", model="moe", options={"plugins.gmm.backend": "bmm"})
    (plain,) = parity("gmm", model="moe", options={"plugins.gmm.backend": "loop"})
    products = LAYERS * MICRO_BATCHES * 6
    assert outcome.operations["bmm"] - plain.operations.get("bmm", 0) == products
    assert plain.operations["mm"] - outcome.operations["mm"] == products * EXPERTS


def test_activations_other_than_silu_are_kept_too(parity: Parity) -> None:
    parity("gmm", model="moe", config={"model.activation": "gelu"})
