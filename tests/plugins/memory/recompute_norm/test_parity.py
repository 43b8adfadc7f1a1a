"""Runs with recompute-norm against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.parity import Parity
from tests.support.norm_operator import NORM

LAYERS, MICRO_BATCHES = 2, 4
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
SWAP: Final = {"plugins.swap-attention.min_bytes": 1}


def more_norms(parity: Parity, *names: str, **case: Any) -> int:
    """How many more norms one rank computes in the forward."""
    (plain,) = parity([name for name in names if name != "recompute-norm"], **case)
    (outcome,) = parity(names, **case)
    return outcome.operations[NORM] - plain.operations[NORM]


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_both_norms_are_computed_again_and_no_bit_changes(parity: Parity, model: str) -> None:
    config = {**DROPOUT, **(SHARED if model == "moe" else {})}
    again = more_norms(parity, "recompute-norm", model=model, config=config)
    assert again == 2 * MICRO_BATCHES * LAYERS


def test_only_the_first_layers_compute_them_again(parity: Parity) -> None:
    options = {"plugins.recompute-norm.num_layers": 1}
    assert more_norms(parity, "recompute-norm", options=options) == 2 * MICRO_BATCHES


@pytest.mark.exhaustive(by=lambda values: ())
@pytest.mark.parametrize(
    "values",
    [
        {"model.normalization": "LayerNorm"},
        {"model.norm_placement": "both"},
        {"model.fp32_residual_connection": True},
        {"model.add_bias_linear": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_no_bit_changes_in_other_models(parity: Parity, values: Mapping[str, Any]) -> None:
    parity("recompute-norm", config=values)


@pytest.mark.needs_plugins("swap-attention", "recompute-activation")
def test_the_attention_of_the_same_layers_is_offloaded_without_its_input(parity: Parity) -> None:
    names = ("recompute-activation", "recompute-norm", "swap-attention")
    (swapped,) = parity("swap-attention", config=DROPOUT, options=SWAP)
    (outcome,) = parity(names, config=DROPOUT, options=SWAP)
    moved = "swap-attention/swap_bytes"
    assert 0 < outcome.metrics[moved] < swapped.metrics[moved]
    assert more_norms(parity, *names, config=DROPOUT, options=SWAP) == 2 * MICRO_BATCHES * LAYERS


@pytest.mark.exhaustive(by=lambda layout: {*layout} & {"vpp"})
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_no_bit_changes_on_several_ranks(parity: Parity, layout: dict[str, int]) -> None:
    """The campaign ``together`` has every layout."""
    config = {"model.num_layers": 4} if "vpp" in layout else {}
    plain = parity((), layout=layout, config=config)
    found = parity("recompute-norm", layout=layout, config=config)
    held = 4 // 2 if "vpp" in layout else LAYERS
    for one, other in zip(found, plain, strict=True):
        assert one.operations[NORM] - other.operations[NORM] == 2 * held * MICRO_BATCHES
