"""The average by its formula; AdamW's weights bit for bit; saved, planned, and in other layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from tests.core.train.runs import Runs
from tests.support.costs import planned
from tests.support.small_runs import Values, outcome_of, training

NAME, DECAY, STEPS = "ema-adamw", 0.75, 4
VALUES = {
    **DENSE,
    "model.num_layers": 3,
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.5,
    "plugins.ema-adamw.decay": DECAY,
}
BF16 = {"train.precision": "bf16"}
SHARDED = {"ddp.use_distributed_optimizer": True}
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


def after_each_step(values: Values, enable: tuple[str, ...]) -> list[Any]:
    """This rank's state before the first and after each step. A job for the pool."""
    from ascend_run.core.checkpoint.optimizer_shards import optimizer_shards
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors

    found = []
    with training(values, enable) as run:
        bundle = run.bundle
        tensors = sharded_tensors(bundle.chunks, vocab_size=values["model.vocab_size"])
        for step in range(STEPS + 1):
            if step:
                run.step()
            states = optimizer_shards(bundle.optimizer, tensors) if step else []
            found.append(outcome_of([*model_shards(tensors, prefix="model"), *states]))
    return found


def history(pool: GlooPool, values: Values, size: int, *enable: str) -> list[Mapping[str, Tensor]]:
    """Full tensors before the first and after each step."""
    every_rank = pool.run(after_each_step, size, values, enable, timeout=100)
    steps = [full_tensors(ranks) for ranks in zip(*every_rank, strict=True)]
    assert [problem for step in steps for problem in step.problems()] == []
    return [step.tensors for step in steps]


@pytest.mark.parametrize("warmup", [False, True], ids=["constant", "warmup"])
@pytest.mark.parametrize(
    ("layout", "size"),
    [(SHARDED, 2), ({**TP, **SHARDED, **BF16}, 4)],
    ids=["fp32 dp2", "bf16 tp2 dp2"],
)
@pytest.mark.exhaustive
def test_the_average_follows_the_weights_of_plain_adamw(
    gloo_pool: GlooPool, layout: Values, size: int, warmup: bool
) -> None:
    """Weights and moments are AdamW's bit for bit; the average is that of float32 weights."""
    values = {**VALUES, **layout}
    plain = {k: v for k, v in values.items() if not k.startswith("plugins.")}
    want = history(gloo_pool, plain, size)
    got = history(gloo_pool, {**values, "plugins.ema-adamw.warmup": warmup}, size, NAME)
    for mine, theirs in zip(got, want, strict=True):
        assert [name for name, t in theirs.items() if not torch.equal(mine[name], t)] == []
    kind = "optimizer/main_param/" if "train.precision" in layout else "model/"
    for name, start in got[0].items():
        average = start.double()
        parameter = name.removeprefix("model/")
        for step in range(1, STEPS + 1):
            decay = min(DECAY, (1 + step) / (10 + step)) if warmup else DECAY
            average = decay * average + (1 - decay) * got[step][kind + parameter].double()
            found = got[step][f"optimizer/ema/{parameter}"]
            assert found.dtype is torch.float32
            torch.testing.assert_close(found.double(), average, rtol=1e-6, atol=1e-7)


def test_a_stopped_run_resumes_bitwise_with_its_average(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    runs = Runs(gloo_pool, tmp_path, ({**VALUES, **BF16, **SHARDED}, 2, (NAME,)))
    runs.assert_the_same_in_two_halves()
    (first, _) = runs("straight-again")
    assert any(key.startswith("optimizer/ema/") for key in first.tensors)


def test_the_plan_has_four_more_bytes_for_each_trained_parameter() -> None:
    (_, (plain,)), (_, (cost,)) = (
        planned({k: v for k, v in VALUES.items() if enable or not k.startswith("plugins.")}, enable)
        for enable in ((), (NAME,))
    )
    assert cost.memory.optimizer - plain.memory.optimizer == 4 * plain.trained_parameters
