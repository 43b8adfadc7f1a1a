"""A run that is cut in two, evaluated in between or made again comes out bit for bit the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool

from .runs import HALF, STEPS, Runs, assert_same

_DROPOUT = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
DENSE_RUN = ({**DENSE, **_DROPOUT, "train.micro_batch_size": 2}, 1, ())
HALF_PRECISION = ({**DENSE_RUN[0], "train.precision": "bf16"}, 1, ())
FP16_RUN = (
    {
        **DENSE_RUN[0],
        "train.precision": "fp16",
        "optimizer.initial_loss_scale": 8.0,
        "optimizer.loss_scale_window": 2,
    },
    1,
    (),
)
MOE_RUN = (
    {
        **MOE,
        **_DROPOUT,
        "train.micro_batch_size": 2,
        "parallel.expert_model_parallel_size": 2,
    },
    2,
    (),
)
KINDS = pytest.mark.parametrize(
    "kind",
    [DENSE_RUN, HALF_PRECISION, FP16_RUN, MOE_RUN],
    ids=["dense", "bf16", "fp16", "two ranks with experts"],
)


@pytest.fixture
def runs(gloo_pool: GlooPool, tmp_path: Path, kind: Any) -> Runs:
    return Runs(gloo_pool, tmp_path, kind)


@pytest.mark.exhaustive(by=lambda kind: [kind[1]] if kind in (FP16_RUN, MOE_RUN) else [])
@KINDS
def test_a_run_in_two_halves_is_the_run_in_one(runs: Runs) -> None:
    runs.assert_the_same_in_two_halves()


@pytest.mark.exhaustive(by=lambda kind: [kind[1]])
@KINDS
def test_evaluations_and_checkpoints_do_not_disturb_training(runs: Runs) -> None:
    plain = runs("plain")
    watched = runs("watched", train__eval_interval=2, checkpoint__save_interval=2)
    assert_same(watched, plain)
    losses = [line for line in watched[0].readings if "loss" in line]
    assert losses == plain[0].readings  # which has no evaluation at all
    evaluations = [line for line in watched[0].readings if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert len({line["eval_loss"] for line in evaluations}) == 4


@pytest.mark.exhaustive(by=lambda kind: [])
@pytest.mark.parametrize("kind", [DENSE_RUN, MOE_RUN], ids=["dense", "two ranks with experts"])
def test_the_same_seed_makes_the_same_run_and_another_does_not(runs: Runs) -> None:
    first = runs("first")
    assert_same(first, runs("again"))
    other = runs("other", run__seed=18)
    assert other[0].readings[0]["loss"] != first[0].readings[0]["loss"]


@pytest.mark.parametrize("kind", [DENSE_RUN], ids=["dense"])
def test_every_evaluation_reads_the_same_samples(runs: Runs) -> None:
    """With a rate of zero the model stays, and so does its loss."""
    (ended,) = runs("still", train__eval_interval=1, optimizer__lr=0.0)
    losses = {line["eval_loss"] for line in ended.readings if "eval_loss" in line}
    assert len(losses) == 1
    assert len({line["loss"] for line in ended.readings if "loss" in line}) == STEPS


@pytest.mark.parametrize("kind", [({**DENSE, "train.micro_batch_size": 1}, 1, ())], ids=["dense"])
def test_a_run_resumes_on_other_ranks(runs: Runs) -> None:
    straight = runs("straight")
    runs("moved", train__train_iters=HALF, checkpoint__save_interval=HALF)
    runs.world_size = 2  # two data-parallel ranks share each global batch
    moved = runs("moved", checkpoint__save_interval=HALF)
    losses = [[line["loss"] for line in ended[0].readings] for ended in (moved, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    weights = [name for name in straight[0].tensors if name.startswith("model/")]
    for name in weights:
        torch.testing.assert_close(
            moved[0].tensors[name], straight[0].tensors[name], rtol=1e-5, atol=1e-6
        )
