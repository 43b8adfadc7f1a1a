"""Every adapter's gradient beside fused-mlp against lora alone on one rank, in float64, before the
optimizer; then the weights after five steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.runtime import RankOutcome
from tests.plugins.fine_tuning.adapter_plans import LONGER, RECOMPUTED
from tests.plugins.fine_tuning.adapter_trials import Trials, assert_parity
from tests.support.needed_plugins import names_of

MERGED: Final = {**LONGER, "plugins.cc-lora.merge": True}
CLAMPED: Final = {"model.activation_func_clamp_value": 0.3, "model.glu_linear_offset": 1.0}
ALONE: Final = ("cc-lora", "swiglu", "recompute-norm")
"""Beside which one rank with lora alone is compared with."""
CASES: Final[Mapping[str, tuple[str, dict[str, int], tuple[str, ...], dict[str, Any]]]] = {
    "one rank": ("dense", {}, (), {}),
    "tp=2": ("dense", {"tp": 2, "sp": 0}, (), {}),
    "tp=2 sp dp=2": ("dense", {"tp": 2, "dp": 2}, (), {}),
    "tp=4 sp": ("dense", {"tp": 4}, (), {}),
    "tp=2 sp pp=2": ("dense", {"tp": 2, "pp": 2}, (), {}),
    "tp=2 sp cp=2": ("dense", {"cp": 2, "tp": 2}, ("ulysses",), {}),
    "tp=2 sp, cc-lora": ("dense", {"tp": 2}, ("cc-lora",), {"plugins.cc-lora.slices": 3}),
    "tp=2, cc-lora": ("dense", {"tp": 2, "sp": 0}, ("cc-lora",), {}),
    "tp=2 sp, merged": ("dense", {"tp": 2}, ("cc-lora",), MERGED),
    "tp=2, merged": ("dense", {"tp": 2, "sp": 0}, ("cc-lora",), MERGED),
    "tp=2 sp, two sequences": ("dense", {"tp": 2}, (), {"train.micro_batch_size": 2}),
    "tp=2 sp, recomputed": ("dense", {"tp": 2}, (), RECOMPUTED),
    "tp=2 sp, norms discarded": ("dense", {"tp": 2}, ("recompute-norm",), {}),
    "one rank, biases": ("dense", {}, (), {"model.add_bias_linear": True}),
    "tp=2 sp, biases": ("dense", {"tp": 2}, (), {"model.add_bias_linear": True}),
    "one rank, another gate": ("dense", {}, (), {"model.activation": "gelu", **CLAMPED}),
    "tp=2 sp, kernel of the gate": ("dense", {"tp": 2}, ("swiglu",), {}),
    "tp=2 sp dp=2, distributed optimizer": (
        "dense",
        {"tp": 2, "dp": 2},
        (),
        {"ddp.use_distributed_optimizer": True},
    ),
    "dp=2, weights gathered late": (
        "dense",
        {"dp": 2},
        (),
        {
            "ddp.use_distributed_optimizer": True,
            "ddp.overlap_grad_reduce": True,
            "ddp.overlap_param_gather": True,
            "ddp.bucket_size": 4000,
        },
    ),
    "adapted experts": ("mixed", {}, (), {}),
    "adapted experts tp=2 sp": ("mixed", {"tp": 2}, (), {}),
    "adapted experts tp=2 sp, cc-lora": ("mixed", {"tp": 2}, ("cc-lora",), {}),
    "adapted experts gmm tp=2 sp ep=2": ("mixed", {"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "adapted experts tp=2 sp, recomputed": ("mixed", {"tp": 2}, (), RECOMPUTED),
}
NUM_PARTS: Final = {"dense": 2 * (4 + 7), "mixed": (4 + 7) + (2 + 4 + 5)}
"""Model -> its matrices: the A of each linear, the B of each part; five of a layer's experts."""


def with_and_without(
    trials: Trials, case: str, steps: int = 0
) -> tuple[list[RankOutcome], list[RankOutcome]]:
    """Return the run with fused-mlp, and that of lora alone on one rank."""
    model, layout, beside, config = CASES[case]
    model_keys = ("model.", "data.", "train.")
    common = {key: value for key, value in config.items() if key.startswith(model_keys)}
    names = ("fused-mlp", *beside)
    return trials(model, layout, names, steps, config), trials(model, {}, (), steps, common)


@pytest.mark.exhaustive(by=lambda case: [*CASES[case][2], *CASES[case][3]])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[2]))
def test_every_adapters_gradient_is_that_of_one_rank(trials: Trials, case: str) -> None:
    ours, plain = with_and_without(trials, case)
    assert_parity(ours, plain, 1e-10)
    assert len({shard.name for shard in plain[0].shards}) == NUM_PARTS[CASES[case][0]]


@pytest.mark.exhaustive(by=lambda case: [])
@pytest.mark.parametrize(
    "case",
    [
        "tp=2 sp pp=2",
        "one rank",
        "tp=2 sp dp=2, distributed optimizer",
        "dp=2, weights gathered late",
        "adapted experts tp=2 sp",
    ],
)
def test_weights_after_five_steps_are_those_of_one_rank(trials: Trials, case: str) -> None:
    assert_parity(*with_and_without(trials, case, 5), 1e-5)


@pytest.mark.exhaustive(by=lambda layout: [*layout.items()])
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": 1}, {"tp": 2, "sp": 0}], ids=str)
def test_dropout_draws_the_masks_of_lora(trials: Trials, layout: Mapping[str, int]) -> None:
    dropout = {"plugins.lora.dropout": 0.3}
    ours = trials("dense", layout, ("fused-mlp",), 0, dropout)
    assert_parity(ours, trials("dense", layout, (), 0, dropout), 1e-10)


@pytest.mark.exhaustive(by=lambda options: [*options])
@pytest.mark.parametrize(
    "options",
    [
        {"rslora": True},
        {
            "rank_pattern": {"linear_fc1_gate": 2, "linear_fc2": 5},
            "alpha_pattern": {"linear_fc2": 3},
        },
        {"target_modules": ["linear_q", "linear_fc1_up", "linear_fc2"]},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_adapters_are_those_of_lora(trials: Trials, options: Mapping[str, Any]) -> None:
    """After three steps, in which B leaves zero."""
    values = {f"plugins.lora.{name}": value for name, value in options.items()}
    values |= {"plugins.lora.load": None, "optimizer.lr": 0.05}
    ours = trials("dense", {"tp": 2}, ("fused-mlp",), 3, values)
    assert_parity(ours, trials("dense", {}, (), 3, values), 1e-5)


def test_adapters_in_virtual_stages_are_those_of_one_rank(trials: Trials) -> None:
    deep = {"model.num_layers": 4, "plugins.lora.load": None}  # as initialized: B is zero
    stages = {"tp": 2, "pp": 2, "vpp": 2}
    ours = trials("dense", stages, ("fused-mlp",), 3, {**deep, **RECOMPUTED})
    assert_parity(ours, trials("dense", {}, (), 3, deep), 1e-5)


def gathers(outcome: RankOutcome) -> int:
    return outcome.collectives.get("_allgather_base_", 0)


def test_one_gather_of_an_mlp_is_left_out(trials: Trials) -> None:
    """That of the output's gradient for the adapter: of two layers and four micro-batches."""
    ours, alone = trials("dense", {"tp": 2}, ("fused-mlp",)), trials("dense", {"tp": 2})
    for one, other in zip(ours, alone, strict=True):
        assert gathers(other) - gathers(one) == 2 * 4
        for name in ("_reduce_scatter_base_", "allreduce_"):
            assert one.collectives.get(name) == other.collectives.get(name)
