"""The gradient of every parameter against transformers, in float64; and the formula at its ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ascend_run.ops.preference_loss import Answers, reward_loss, reward_metrics
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.testing.pool import GlooPool
from tests.support.folder_gradients import errors_of_gradients, write_gradients
from tests.support.plain_rewards import PlainRewards, scorer, write_scorer
from tests.support.preference_files import tokenized, write_models_and_pairs

from .test_training import values

PAIRS, PACKS = 6, 2


@pytest.mark.parametrize("packing", [False, True])
def test_each_gradient_is_that_of_transformers(
    gloo_pool: GlooPool, tmp_path: Path, packing: bool
) -> None:
    models = write_models_and_pairs(tmp_path, PAIRS)
    write_scorer(models / "model-scorer", models / "model")
    pairs = tokenized(models / "blocks", models / "train.jsonl")
    with computing_in(torch.float64):
        model = scorer(models / "model-scorer").double()
        PlainRewards(model=model, margin=0.3, centering=0.05).backward(pairs)
    write_gradients(model, models / "gradients")
    run = values(
        models,
        tmp_path / "run",
        train__global_batch_size=PACKS if packing else PAIRS,
        plugins__orm__packing=packing,
        plugins__orm__margin=0.3,
        plugins__orm__center_rewards_coefficient=0.05,
    )
    (errors,) = gloo_pool.run(errors_of_gradients, 1, run, str(models / "gradients"), timeout=100)
    assert max(errors.values()) < 1e-10, errors
    assert [name for name in errors if name.endswith("score.weight")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_loss_is_finite_at_large_gaps(dtype: torch.dtype) -> None:
    """There the logarithm of a sigmoid that was taken first is minus infinity."""
    chosen = torch.tensor([-5e3, 5e3, 0.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([5e3, -5e3, 0.0], dtype=dtype, requires_grad=True)
    loss = reward_loss(Answers(chosen_P=chosen, rejected_P=rejected))
    torch.testing.assert_close(
        loss,
        torch.tensor([1e4, 0.0, 2.0], dtype=dtype).where(
            torch.tensor([True, True, False]), torch.log(torch.tensor(2.0, dtype=dtype))
        ),
    )
    loss.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0, -0.5]
    assert rejected.grad.tolist() == [1.0, 0.0, 0.5]


def test_equal_rewards_are_not_accurate() -> None:
    rewards = Answers(chosen_P=torch.tensor([1.0, 2.0]), rejected_P=torch.tensor([1.0, 1.0]))
    assert reward_metrics(rewards)["rewards/accuracies"].tolist() == [0.0, 1.0]
