"""Runs with smart-swap against the run without it: bitwise equal."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest
import torch

from ascend_run.plugin_api import Storage
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from tests.support.costs import planned

from .watched import Seen, watched_trial

NAME: Final = "smart-swap"
OPTIONS: Final = {
    f"plugins.{NAME}.bandwidth_gb": 1e6,
    f"plugins.{NAME}.min_bytes": 1,
    f"plugins.{NAME}.warmup_steps": 0,
    "plugins.recompute.num_layers": 1,
}
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}


def trained(
    pool: GlooPool, *, steps: int, beside: tuple[str, ...] = (), ranks: int = 1, **case: Any
) -> list[tuple[RankOutcome, list[Seen]]]:
    """Compare with the run without the plugin, bit by bit; return what the ranks did."""
    given = Case(plugins=(), options=OPTIONS, **case)
    make = partial(given.trial, steps=steps, sharded=True, counted=False)
    plain = pool.run(run_trial, ranks, make(beside))
    swapped = pool.run(watched_trial, ranks, make((*beside, NAME)))
    for (one, _), other in zip(swapped, plain, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        for shard, expected in zip(one.shards, other.shards, strict=True):
            assert shard.name == expected.name
            assert torch.equal(shard.tensor, expected.tensor), shard.name
    return swapped


@pytest.mark.exhaustive(by=lambda beside: ())
@pytest.mark.parametrize(
    "beside",
    [
        (),
        pytest.param(("recompute",), marks=pytest.mark.needs_plugins("recompute")),
        pytest.param(
            ("recompute-activation", "recompute-norm"),
            marks=pytest.mark.needs_plugins("recompute-activation", "recompute-norm"),
        ),
    ],
    ids=lambda names: ", ".join(names) or "alone",
)
def test_no_bit_changes_in_twenty_steps_with_dropout(
    gloo_pool: GlooPool, beside: tuple[str, ...]
) -> None:
    ((_, seen),) = trained(gloo_pool, steps=20, beside=beside, config=DROPOUT)
    assert len(seen) == 18  # one is profiled, and the last one is not looked at
    assert all(as_planned and sent and not late for as_planned, sent, late, _ in seen)
    assert seen[0][3] >= seen[1][3] == seen[-1][3] == 0  # what others hold is left out


def test_no_bit_changes_in_a_virtual_pipeline(gloo_pool: GlooPool) -> None:
    config = {
        **DROPOUT,
        "model.num_layers": 4,
        "parallel.virtual_pipeline_model_parallel_size": 2,
        "train.global_batch_size": 4,
    }
    for _, seen in trained(gloo_pool, steps=4, ranks=2, layout={"pp": 2}, config=config):
        assert len(seen) == 2
        assert all(as_planned and sent and not late for as_planned, sent, late, _ in seen)


def test_gradients_and_steps_with_all_modules_are_those_without(parity: Parity) -> None:
    modules = ["input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"]
    parity(NAME, options={**OPTIONS, f"plugins.{NAME}.modules": modules})


def test_experts_are_left_where_they_are(gloo_pool: GlooPool) -> None:
    ((_, seen),) = trained(gloo_pool, steps=4, model="moe")
    assert all(as_planned and sent for as_planned, sent, _, _ in seen)


def test_a_run_moves_the_layers_of_its_plan_within_a_budget(gloo_pool: GlooPool) -> None:
    """Over a link without delay the choice depends on no time; the first layers are away longest.
    The budget is what two of four layers save."""
    config = {**DENSE, **OPTIONS, "model.num_layers": 4, "train.global_batch_size": 3}
    del config["plugins.recompute.num_layers"]
    _, (cost,) = planned(config, (NAME,))
    parts = ("self_attention", "mlp")
    layer = sum(tensor.nbytes for tensor in cost.rank.saved[0] if tensor.part in parts)
    config[f"plugins.{NAME}.activation_mb"] = 2 * layer / 2**20
    _, (cost,) = planned(config, (NAME,))

    trial = Trial(plugins=(NAME,), config=config, steps=4)
    ((_, seen),) = gloo_pool.run(watched_trial, 1, trial)

    assert cost.changes[NAME].saved[0].layers == (0, 1)
    moved = cost.offloaded[Storage.HOST]
    assert moved.left == moved.returned == 3 * 2 * layer
    assert seen[-1] == (True, moved.left, 0, 0)
