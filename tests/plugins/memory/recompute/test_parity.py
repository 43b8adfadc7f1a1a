"""Runs with recompute against the run without it: bitwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.parity import Parity

LAYERS, MICRO_BATCHES, EXPERTS = 2, 4, 4
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SHARED: Final = {"model.moe_shared_expert_intermediate_size": 24}
SELECTIVE: Final = {"plugins.recompute.granularity": "selective"}


@pytest.mark.parametrize(("count", "layers"), [(None, LAYERS), (1, 1)])
def test_layers_run_again_and_no_bit_changes(
    parity: Parity, count: int | None, layers: int
) -> None:
    options = {} if count is None else {"plugins.recompute.num_layers": count}
    (outcome,) = parity("recompute", config=DROPOUT, options=options)
    assert outcome.operations["silu"] == (LAYERS + layers) * MICRO_BATCHES


def test_groups_of_layers_run_again(parity: Parity) -> None:
    options = {"plugins.recompute.method": "uniform", "plugins.recompute.num_layers": 2}
    (outcome,) = parity("recompute", config=DROPOUT, options=options)
    assert outcome.operations["silu"] == 2 * LAYERS * MICRO_BATCHES


@pytest.mark.exhaustive(by=lambda model: [model])
@pytest.mark.parametrize(
    ("model", "modules", "again"),
    [
        ("dense", ["mlp"], LAYERS),
        ("dense", ["core_attn", "mlp"], LAYERS),
        ("moe", ["moe"], LAYERS * (EXPERTS + 1)),
        ("moe", ["shared_experts"], LAYERS),
    ],
    ids=["mlp", "core_attn and mlp", "moe", "shared experts"],
)
def test_modules_run_again(parity: Parity, model: str, modules: list[str], again: int) -> None:
    config = {**DROPOUT, **(SHARED if model == "moe" else {})}
    options = {**SELECTIVE, "plugins.recompute.modules": modules}
    (plain,) = parity((), model=model, config=config)
    (outcome,) = parity("recompute", model=model, config=config, options=options)
    assert outcome.operations["silu"] - plain.operations["silu"] == again * MICRO_BATCHES


def test_biases_of_a_recomputed_feed_forward_have_their_gradients(parity: Parity) -> None:
    """Megatron's layers return them beside their output."""
    parity("recompute", config={"model.add_bias_linear": True}, options=SELECTIVE)


@pytest.mark.needs_plugins("recompute-activation")
def test_the_next_layers_recompute_their_activation_only(parity: Parity) -> None:
    names = ("recompute", "recompute-activation")
    (outcome,) = parity(names, config=DROPOUT, options={"plugins.recompute.num_layers": 1})
    assert outcome.operations["silu"] == 2 * LAYERS * MICRO_BATCHES
    (first,) = parity("recompute", options={"plugins.recompute.num_layers": 1})
    assert outcome.operations["mm"] == first.operations["mm"]


@pytest.mark.needs_plugins("swap-attention", "recompute-norm")
def test_feed_forwards_are_recomputed_where_the_attention_is_offloaded(parity: Parity) -> None:
    options = {**SELECTIVE, "plugins.swap-attention.min_bytes": 1}
    names = ("recompute", "recompute-norm", "swap-attention")
    (outcome,) = parity(names, config=DROPOUT, options=options)
    assert outcome.operations["silu"] == 2 * LAYERS * MICRO_BATCHES
    assert outcome.metrics["swap-attention/swap_bytes"] > 0


@pytest.mark.exhaustive(by=lambda layout: {*layout} & {"vpp"})
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"tp": 2}, {}),
        ({"pp": 2, "vpp": 2}, {"plugins.recompute.num_layers": 1}),
        ({"dp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_no_bit_changes_on_several_ranks(
    parity: Parity, layout: dict[str, int], more: Mapping[str, Any]
) -> None:
    """The campaign ``together`` has every layout. One layer of a rank with two chunks is one."""
    config = {"model.num_layers": 4} if "vpp" in layout else {}
    case: dict[str, Any] = {"layout": layout, "model": "moe" if "ep" in layout else "dense"}
    plain = parity((), **case, config=config)
    found = parity("recompute", **case, config=config, options=more)
    for one, other in zip(found, plain, strict=True):
        share = 1.5 if more else 2
        assert one.operations["silu"] == share * other.operations["silu"]
