"""Runs with recompute-activation against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES = 2, 4
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
SWAP: Final = {"plugins.swap-attention.min_bytes": 1}


def test_the_activation_is_computed_again_and_no_bit_changes(parity: Parity) -> None:
    (outcome,) = parity("recompute-activation", config=DROPOUT)
    assert outcome.operations["silu"] == 2 * MICRO_BATCHES * LAYERS


def test_only_the_first_layers_compute_it_again(parity: Parity) -> None:
    (outcome,) = parity(
        "recompute-activation", options={"plugins.recompute-activation.num_layers": 1}
    )
    assert outcome.operations["silu"] == (LAYERS + 1) * MICRO_BATCHES


@pytest.mark.exhaustive(by=lambda model: ())
@pytest.mark.parametrize(
    ("model", "operation", "calls"),
    [
        ({"activation": "gelu"}, "gelu", 2),
        ({"activation": "gelu_tanh", "gated_linear_unit": False}, "gelu", 2),
        ({"activation": "squared_relu", "gated_linear_unit": False}, "relu", 2),
        ({"activation": "quick_gelu", "activation_func_clamp_value": 7.0}, "sigmoid", 2),
        ({"add_bias_linear": True}, "silu", 2),
    ],
    ids=["gated gelu", "gelu", "squared relu", "bounded gate", "biases"],
)
def test_any_activation_is_computed_again(
    parity: Parity, model: Mapping[str, Any], operation: str, calls: int
) -> None:
    config = {f"model.{name}": value for name, value in model.items()}
    (outcome,) = parity("recompute-activation", config=config)
    assert outcome.operations[operation] == calls * MICRO_BATCHES * LAYERS


def test_shared_experts_compute_it_again(parity: Parity) -> None:
    (plain,) = parity((), model="moe", config=SHARED)
    (outcome,) = parity("recompute-activation", model="moe", config=SHARED)
    assert outcome.operations["silu"] - plain.operations["silu"] == MICRO_BATCHES * LAYERS


@pytest.mark.needs_plugins("swap-attention")
def test_the_attention_of_the_same_layers_is_offloaded(parity: Parity) -> None:
    (outcome,) = parity(("recompute-activation", "swap-attention"), config=DROPOUT, options=SWAP)
    assert outcome.operations["silu"] == 2 * MICRO_BATCHES * LAYERS
    assert outcome.metrics["swap-attention/swap_bytes"] > 0


@pytest.mark.exhaustive(by=lambda layout: {*layout} & {"vpp"})
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2}], ids=str)
def test_no_bit_changes_on_several_ranks(parity: Parity, layout: dict[str, int]) -> None:
    """The campaign ``together`` has every layout."""
    config = {"model.num_layers": 4} if "vpp" in layout else {}
    plain = parity((), layout=layout, config=config)
    found = parity("recompute-activation", layout=layout, config=config)
    for one, other in zip(found, plain, strict=True):
        assert one.operations["silu"] == 2 * other.operations["silu"]


@pytest.mark.needs_plugins("lora")
def test_adapters_that_read_the_activation_have_their_gradients(parity: Parity) -> None:
    """They read it after the linear that it is computed for."""
    options = {"plugins.lora.target_modules": ["linear_fc2"], "plugins.lora.export": False}
    (outcome,) = parity(("lora", "recompute-activation"), options=options)
    assert outcome.operations["silu"] == 2 * MICRO_BATCHES * LAYERS
