"""Runs with gmm against the run without it, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES, EXPERTS = 2, 4, 4


@pytest.mark.exhaustive(by=lambda backend, layout: [backend, len(layout) > 2])
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("auto", {}),
        ("bmm", {}),
        ("auto", {"dp": 4, "ep": 4}),
        ("bmm", {"pp": 2, "dp": 2, "ep": 2}),
        ("auto", {"tp": 2, "expt_tp": 2}),
        ("bmm", {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}),
    ],
    ids=str,
)
def test_it_keeps_loss_gradients_and_weights(
    parity: Parity, backend: str, layout: dict[str, int]
) -> None:
    """The campaign ``together`` has the layouts without expert tensor parallelism."""
    parity("gmm", model="moe", layout=layout, options={"plugins.gmm.backend": backend})


def test_its_products_are_the_ones_that_run(parity: Parity) -> None:
    (outcome,) = parity("gmm", model="moe", options={"plugins.gmm.backend": "bmm"})
    (plain,) = parity("gmm", model="moe", options={"plugins.gmm.backend": "loop"})
    products = LAYERS * MICRO_BATCHES * 6
    assert outcome.operations["bmm"] - plain.operations.get("bmm", 0) == products
    assert plain.operations["mm"] - outcome.operations["mm"] == products * EXPERTS


@pytest.mark.exhaustive(by=lambda backend: [backend])
@pytest.mark.parametrize(
    ("backend", "sum_of", "layout"),
    [
        ("loop", "addmm_", {"dp": 2}),
        ("bmm", "baddbmm_", {"dp": 2, "ep": 2}),
        ("loop", "addmm_", {"tp": 2, "dp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_gradients_that_are_added_to_their_buffer_are_the_same(
    parity: Parity, backend: str, sum_of: str, layout: dict[str, int]
) -> None:
    """At least two micro-batches on each rank, so that gradients accumulate."""
    options = {
        "plugins.gmm.backend": backend,
        "plugins.gmm.gradient_accumulation_fusion": True,
    }
    for outcome in parity("gmm", model="moe", layout=layout, options=options):
        assert outcome.operations[sum_of] >= 2 * LAYERS * 2


def test_activations_other_than_silu_are_kept_too(parity: Parity) -> None:
    parity("gmm", model="moe", config={"model.activation": "gelu"})


@pytest.mark.parametrize(
    ("backend", "layout"), [("auto", {"dp": 2, "ep": 2}), ("bmm", {})], ids=str
)
def test_experts_that_no_token_goes_to_are_kept_too(
    parity: Parity, backend: str, layout: dict[str, int]
) -> None:
    """Sixteen tokens of a micro-batch select two each of more experts than that."""
    outcomes = parity(
        "gmm",
        model="moe",
        layout=layout,
        config={"model.num_moe_experts": 32},
        options={"plugins.gmm.backend": backend},
    )
    idle = [
        expert
        for outcome in outcomes
        for shard in outcome.shards
        if shard.name.endswith("layers.0.mlp.experts.fc1")
        for expert in shard.tensor.unbind(-3)
        if not expert.any()
    ]
    assert idle
