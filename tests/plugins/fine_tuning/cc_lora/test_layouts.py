"""Every adapter's gradient beside cc-lora against lora alone on one rank, in float64, before the
optimizer; then the weights after five steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.testing.runtime import RankOutcome
from tests.plugins.fine_tuning.adapter_plans import LONGER, RECOMPUTED
from tests.plugins.fine_tuning.adapter_trials import Trials, assert_parity
from tests.support.needed_plugins import names_of

EXPERT_TP: Final = {"parallel.expert_tensor_parallel_size": 2}
MERGED: Final = {**LONGER, "plugins.cc-lora.merge": True}
CASES: Final[Mapping[str, tuple[str, dict[str, int], tuple[str, ...], dict[str, Any]]]] = {
    "tp=2": ("dense", {"tp": 2, "sp": 0}, (), {}),
    "tp=2 sp dp=2": ("dense", {"tp": 2, "dp": 2}, (), {}),
    "tp=4 sp, two key-value groups": ("dense", {"tp": 4}, (), {}),
    "tp=4, two key-value groups": ("dense", {"tp": 4, "sp": 0}, (), {}),
    "tp=2 sp pp=2": ("dense", {"tp": 2, "pp": 2}, (), {}),
    "tp=2 pp=2": ("dense", {"tp": 2, "pp": 2, "sp": 0}, (), {}),
    "tp=2 sp cp=2 ulysses": ("dense", {"cp": 2, "tp": 2}, ("ulysses",), {}),
    "tp=2 sp cp=2 ring": ("dense", {"cp": 2, "tp": 2}, ("ring-attention",), {}),
    "tp=2 sp, one slice": ("dense", {"tp": 2}, (), {"plugins.cc-lora.slices": 1}),
    "tp=2 sp, three slices": ("dense", {"tp": 2}, (), {"plugins.cc-lora.slices": 3}),
    "tp=2 sp, merged": ("dense", {"tp": 2}, (), MERGED),
    "tp=2, merged": ("dense", {"tp": 2, "sp": 0}, (), MERGED),
    "tp=4 sp, merged": ("dense", {"tp": 4}, (), MERGED),
    "tp=2 sp, two sequences": ("dense", {"tp": 2}, (), {"train.micro_batch_size": 2}),
    "tp=2 sp, recomputed": ("dense", {"tp": 2}, (), RECOMPUTED),
    "tp=2, recomputed": ("dense", {"tp": 2, "sp": 0}, (), RECOMPUTED),
    "tp=2 sp, biases": ("dense", {"tp": 2}, (), {"model.add_bias_linear": True}),
    "tp=2 sp dp=2, distributed optimizer": (
        "dense",
        {"tp": 2, "dp": 2},
        (),
        {"ddp.use_distributed_optimizer": True},
    ),
    "experts tp=2 ep=2": ("moe", {"tp": 2, "dp": 2, "ep": 2}, (), {}),
    "experts gmm tp=2 ep=2": ("moe", {"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "adapted experts tp=2": ("experts", {"tp": 2}, (), {}),
    "adapted experts gmm tp=2 ep=2": ("experts", {"tp": 2, "dp": 2, "ep": 2}, ("gmm",), {}),
    "adapted experts expert tp=2": ("experts", {"tp": 2}, (), EXPERT_TP),
    "adapted experts tp=2, recomputed": ("experts", {"tp": 2}, (), RECOMPUTED),
    "adapted experts tp=2, merged": ("experts", {"tp": 2}, (), MERGED),
}
NUM_PARTS: Final = {"dense": 2 * (4 + 7), "moe": 2 * (2 + 4), "experts": 2 * (2 + 4 + 5)}
"""Model -> its matrices: the A of each linear, the B of each part; five of a layer's experts."""


def with_and_without(
    trials: Trials, case: str, steps: int = 0
) -> tuple[list[RankOutcome], list[RankOutcome]]:
    """Return the run with cc-lora, and that of lora alone on one rank."""
    model, layout, beside, config = CASES[case]
    of_plugin = ("plugins.cc-lora.", "parallel.")
    common = {key: value for key, value in config.items() if not key.startswith(of_plugin)}
    names = ("cc-lora", *beside)
    return trials(model, layout, names, steps, config), trials(model, {}, (), steps, common)


@pytest.mark.exhaustive(by=lambda case: CASES[case][3])
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
        "tp=2",
        "tp=2 sp dp=2, distributed optimizer",
        "experts tp=2 ep=2",
        "adapted experts expert tp=2",
    ],
)
def test_weights_after_five_steps_are_those_of_one_rank(trials: Trials, case: str) -> None:
    assert_parity(*with_and_without(trials, case, 5), 1e-5)


@pytest.mark.exhaustive(by=lambda sp: [sp])
@pytest.mark.parametrize("sp", [1, 0])
def test_dropout_draws_the_masks_of_lora(trials: Trials, sp: int) -> None:
    dropout = {"plugins.lora.dropout": 0.3}
    layout = {"tp": 2, "sp": sp}
    ours = trials("dense", layout, ("cc-lora",), 0, dropout)
    assert_parity(ours, trials("dense", layout, (), 0, dropout), 1e-10)


def test_adapters_in_virtual_stages_are_those_of_one_rank(trials: Trials) -> None:
    deep = {"model.num_layers": 4, "plugins.lora.load": None}  # as initialized: B is zero
    stages = {"tp": 2, "pp": 2, "vpp": 2}
    ours = trials("dense", stages, ("cc-lora",), 3, {**deep, **RECOMPUTED})
    assert_parity(ours, trials("dense", {}, (), 3, deep), 1e-5)


def collectives(outcome: RankOutcome) -> dict[str, int]:
    names = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "sum"}
    return {short: outcome.collectives.get(name, 0) for name, short in names.items()}


@pytest.mark.exhaustive(by=lambda sp: ())
@pytest.mark.parametrize(
    ("sp", "slices", "more"),
    [
        (1, 1, {"gather": -2, "scatter": 0, "sum": 0}),  # of a row's output gradient, per layer two
        (1, 2, {"gather": -2 + 4, "scatter": 4, "sum": 0}),
        (0, 2, {"gather": 0, "scatter": 0, "sum": 4}),
    ],
)
def test_collectives_are_sliced_and_one_in_four_gathers_left_out(
    trials: Trials, sp: int, slices: int, more: dict[str, int]
) -> None:
    """Four linears in a layer, two layers and four micro-batches."""
    layout, options = {"tp": 2, "sp": sp}, {"plugins.cc-lora.slices": slices}
    ours = trials("dense", layout, ("cc-lora",), 0, options)
    alone = trials("dense", layout)
    for one, other in zip(ours, alone, strict=True):
        found, plain = collectives(one), collectives(other)
        assert {name: found[name] - plain[name] for name in plain} == {
            name: 2 * 4 * number for name, number in more.items()
        }
