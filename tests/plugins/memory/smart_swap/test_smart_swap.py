"""The plugin's declarations, errors and what is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ascend_run.plugin_api import AscendRunError, ConfigError, Keeping, Numerics, Support
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.smart_swap import SmartSwap, SmartSwapConfig
from ascend_run.testing.models import DENSE
from tests.support.costs import planned

NAME: Final = "smart-swap"
SMALL: Final = {**DENSE, "train.global_batch_size": 1, f"plugins.{NAME}.min_bytes": 1}
MIB: Final = 1 << 20


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(SmartSwap) == ()
    assert SmartSwap.manifest.numerics is Numerics.BITWISE
    assert SmartSwap.manifest.platforms["cpu"] is Support.EMULATED
    assert [flag.flag for flag in SmartSwap.manifest.legacy_flags] == ["--smart-swap"]


@pytest.mark.parametrize(
    "options",
    [
        {"activation_mb": 0.0},
        {"bandwidth_gb": 0.0},
        {"min_bytes": 0},
        {"modules": ("mlp", "mlp")},
        {"warmup_steps": -1},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SmartSwapConfig(**options)


OTHERS: Final = ("adaptive-recompute", "compile", "recompute-in-bubble", "swap-attention")


@pytest.mark.needs_plugins(*OTHERS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_keeps_activations_otherwise_is_refused(other: str) -> None:
    with pytest.raises(AscendRunError, match=f"'{NAME}' cannot run with '{other}'"):
        planned({**SMALL, "plugins.adaptive-recompute.activation_mb": 1.0}, (NAME, other))


def test_experts_are_no_part_of_the_policy() -> None:
    plugin = SmartSwap(SmartSwapConfig())
    dense = plugin.ascend_activation_policy(has_experts=False)
    assert {part: how.keeping for part, how in dense.items()} == {
        "self_attention": Keeping.OFFLOAD,
        "mlp": Keeping.OFFLOAD,
    }
    assert [*plugin.ascend_activation_policy(has_experts=True)] == ["self_attention"]


def test_recomputing_everything_leaves_nothing_to_swap() -> None:
    full = {
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    }
    with pytest.raises(ConfigError, match=rf"{NAME}: all that it treats is within"):
        planned({**SMALL, **full}, (NAME,))


def moved(values: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, float]:
    """Return the layers that plan counts as on the host, and what one of them saves there."""
    _, (cost,) = planned({**SMALL, "model.num_layers": 4, **values}, (NAME,))
    parts = ("self_attention", "mlp")
    nbytes = sum(tensor.nbytes for tensor in cost.rank.saved[0] if tensor.part in parts)
    change = cost.changes.get(NAME)
    return (change.saved[0].layers if change else None), nbytes


def test_plan_moves_layers_until_the_rest_is_within_the_budget() -> None:
    budget = f"plugins.{NAME}.activation_mb"
    everything, nbytes = moved({})
    assert everything == (0, 1, 2)  # the backward of the last one follows at once
    assert moved({budget: 2.5 * nbytes / MIB})[0] == (0, 1)
    assert moved({budget: 2 * nbytes / MIB})[0] == (0, 1)
    assert moved({budget: 4 * nbytes / MIB})[0] is None
    assert moved({"model.num_layers": 1})[0] is None


def test_plan_moves_the_last_layer_of_forwards_that_wait_for_others() -> None:
    values = {**SMALL, "parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 4}
    _, costs = planned({**values, "model.num_layers": 4}, (NAME,), 2)
    assert [cost.changes[NAME].saved[0].layers for cost in costs] == [(0, 1), (2,)]


def test_plan_fetches_with_each_part() -> None:
    """In the first stage, whose peak is a backward. The host of a CPU is the device, so what has
    come back is there twice: less than what a layer saves."""
    values = {**SMALL, "parallel.pipeline_model_parallel_size": 2, "train.global_batch_size": 4}
    values |= {"model.num_layers": 4, "model.vocab_size": 64}
    kept = {f"plugins.{NAME}.activation_mb": 1000.0}
    (swapped, _), (here, _) = (planned({**values, **more}, (NAME,), 2)[1] for more in ({}, kept))
    _, nbytes = moved({})
    assert 0 < swapped.memory.peak - here.memory.peak < nbytes


def test_plan_moves_the_tensors_of_the_modules() -> None:
    _, (cost,) = planned({**SMALL, f"plugins.{NAME}.modules": ["pre_mlp_layernorm"]}, (NAME,))
    (change,) = cost.changes[NAME].saved
    assert change.tensors == ("mlp_norm.*",)
    assert change.at_least == 1
