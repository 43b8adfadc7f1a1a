"""Full runs with compiled layers: interrupted and resumed, with and without them."""

from __future__ import annotations

import shutil

import pytest
import torch

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import HALF, Ended, Runs, assert_same

VALUES = {
    **DENSE,
    # As little as has graphs: what larger layers compute in them is shown by their parity.
    "model.num_layers": 1,
    "model.position_embedding_type": "none",
    "model.gated_linear_unit": False,
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "train.micro_batch_size": 2,
}


@pytest.fixture(scope="module")
def runs(gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Prepare runs, with a folder ``halves`` that holds the first half of a compiled run."""
    runs = Runs(gloo_pool, tmp_path_factory.mktemp("runs"), (VALUES, 1, ("compile",)))
    runs("halves", train__train_iters=HALF, checkpoint__save_interval=HALF)
    shutil.copytree(runs.folder / "halves", runs.folder / "left out")
    return runs


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Ended:
    """Return the run without compiled layers."""
    (ended,) = without(runs, "plain")
    return ended


def without(runs: Runs, name: str, **options: int) -> list[Ended]:
    runs.plugins = ()
    try:
        return runs(name, **options)
    finally:
        runs.plugins = ("compile",)


def assert_close(got: Ended, want: Ended) -> None:
    """Check equality up to rounding; different dropout masks would differ more."""
    assert got.values["progress"] == want.values["progress"]
    assert got.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(got.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    losses = [[line["loss"] for line in ended.readings if "loss" in line] for ended in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_in_two_halves_is_the_run_in_one(runs: Runs, plain: Ended) -> None:
    """Bitwise, although the second half compiles again; only one of them evaluates between
    steps."""
    straight = runs("straight", train__eval_interval=2)
    halves = runs("halves", checkpoint__save_interval=HALF)
    assert_same(halves, straight)
    losses = [
        [line["loss"] for line in r[0].readings if "loss" in line] for r in (halves, straight)
    ]
    assert losses[0] == losses[1]
    assert all(line["compile/graphs"] > 0 for line in halves[0].readings)
    assert_close(straight[0], plain)


def test_a_run_started_with_it_resumes_without(runs: Runs, plain: Ended) -> None:
    (mixed,) = without(runs, "left out")
    assert_close(mixed, plain)


def test_a_run_started_without_it_resumes_with_it(runs: Runs, plain: Ended) -> None:
    without(runs, "added", train__train_iters=HALF, checkpoint__save_interval=HALF)
    (mixed,) = runs("added")
    assert_close(mixed, plain)
