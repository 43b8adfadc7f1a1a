"""Two runs of one command: bitwise equal weights and losses; and parity with the run without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ascend_run.testing.parity import Case, Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, run_trial
from tests.support.probed_runs import train

BESIDE = ("gmm", "swap-attention", "ulysses")
OPTIONS = {"plugins.swap-attention.min_bytes": 1}
LAYOUTS = [
    {},
    {"cp": 2, "dp": 2, "ep": 2},
    {"tp": 2, "pp": 2},
]
STEPS = 3


def trained(pool: GlooPool, layout: dict[str, int]) -> list[RankOutcome]:
    """Run again: Parity would return the cached run."""
    case = Case(
        plugins=("deterministic",), beside=BESIDE, model="moe", layout=layout, options=OPTIONS
    )
    trial = case.trial((*BESIDE, "deterministic"), steps=STEPS, sharded=True)
    return pool.run(run_trial, case.world_size, trial)


@pytest.mark.exhaustive(by=lambda layout: [bool(layout)])
@pytest.mark.needs_plugins(*BESIDE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_runs_give_the_same_bits(gloo_pool: GlooPool, layout: dict[str, int]) -> None:
    first, second = trained(gloo_pool, layout), trained(gloo_pool, layout)
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        assert [shard.name for shard in one.shards] == [shard.name for shard in other.shards]
        for shard, again in zip(one.shards, other.shards, strict=True):
            assert torch.equal(shard.tensor, again.tensor), shard.name
    assert len(set(first[0].losses)) == STEPS  # it did learn


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """A different seed changes the result, so the equality above is not trivial."""
    losses = [
        train(
            tmp_path / str(seed), values={"enable": ["deterministic"], "run.seed": seed}
        ).readings()[0]["loss"]
        for seed in (17, 18)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("model", "layout"), [("dense", {"dp": 2}), ("moe", {"tp": 2})], ids=str)
def test_it_keeps_what_the_run_without_it_computes(
    parity: Parity, model: str, layout: dict[str, int]
) -> None:
    parity("deterministic", model=model, layout=layout)


def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(tmp_path: Path) -> None:
    values = {
        "enable": ["deterministic"],
        "checkpoint.save_interval": 1,
        "optimizer.lr_decay_style": "constant",
    }
    through = train(tmp_path / "through", values={**values, "train.train_iters": 4})
    train(tmp_path / "resumed", values={**values, "train.train_iters": 2})
    resumed = train(tmp_path / "resumed", values={**values, "train.train_iters": 4})
    assert [line["loss"] for line in resumed.readings()] == [
        line["loss"] for line in through.readings()
    ]
    for name, weight in through.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
