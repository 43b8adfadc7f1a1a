"""What it trains, compared with plain pre-training. Needs it installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ascend_run_context_pretrain.task import ContextPretrainTask
from torch import Tensor, nn

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import Batch, LossSum
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial

NAME = "context-pretrain"


def outcome_of(pool: GlooPool, **config: object) -> RankOutcome:
    (outcome,) = pool.run(run_trial, 1, Trial(config={**DENSE, **config}), timeout=100)
    return outcome


def with_context(pool: GlooPool, tokens: int) -> RankOutcome:
    return outcome_of(pool, task=NAME, **{f"plugins.{NAME}.context_tokens": tokens})


def test_without_context_every_gradient_is_that_of_pretraining(gloo_pool: GlooPool) -> None:
    got, want = with_context(gloo_pool, 0), outcome_of(gloo_pool, task="pretrain")
    assert got.losses == want.losses
    for shard, expected in zip(got.shards, want.shards, strict=True):
        assert shard.name == expected.name
        assert torch.equal(shard.tensor, expected.tensor)


def test_context_changes_what_is_trained(gloo_pool: GlooPool) -> None:
    assert with_context(gloo_pool, 6).losses != with_context(gloo_pool, 0).losses


class TokenLosses(nn.Module):
    """Stands for a model: the loss of a token is its id."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        attention_mask: Tensor | None,
        document_ends: tuple[int, ...] | None,
    ) -> Tensor:
        return (input_ids * loss_mask).sum()


@pytest.mark.parametrize(
    ("first_place", "context_tokens", "loss", "count"),
    [
        pytest.param(0, 0, 1 + 2 + 8, 3, id="no context"),
        pytest.param(0, 2, 8, 1, id="two of four, one of which is masked anyway"),
        pytest.param(4, 2, 1 + 2 + 8, 3, id="the second half of a sequence"),
        pytest.param(4, 5, 2 + 8, 2, id="context that ends in this half"),
    ],
)
def test_the_loss_is_the_sum_over_the_tokens_behind_the_context(
    first_place: int, context_tokens: int, loss: float, count: int
) -> None:
    places = torch.arange(first_place, first_place + 4)[None]
    tensors = {
        "tokens": torch.tensor([[1, 2, 4, 8]]),
        "labels": torch.tensor([[2, 4, 8, 1]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0, 1.0]]),
        "position_ids": places,
    }
    task = ContextPretrainTask(context_tokens)
    batch = Batch(tensors=tensors, fields=task.batch_fields)
    result = task.forward_step(SimpleNamespace(), TokenLosses(), batch)
    assert isinstance(result, LossSum)
    assert result.sum.item() == loss
    assert result.count.item() == count


@pytest.mark.parametrize("layout", [{"dp": 2}, {"cp": 2}], ids=str)
def test_ranks_that_share_the_work_have_the_gradients_of_one(
    parity: Parity, layout: dict[str, int]
) -> None:
    beside = ["ulysses"] if "cp" in layout else []
    parity([], beside=beside, layout=layout, config={"task": NAME})


def test_context_that_leaves_nothing_to_train_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [f"{key}={DENSE[key]}" for key in DENSE if key.startswith("model.")]
    option = f"plugins.{NAME}.context_tokens"
    words = ["--task", NAME, "data.train=any", "data.seq_length=16", f"{option}=16"]
    assert run(["plan", *words, *sizes]) == 2
    error = capsys.readouterr().err
    assert f"{option}=16 leaves nothing to train of data.seq_length=16; use at most 15" in error
