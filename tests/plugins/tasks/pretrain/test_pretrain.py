"""The pre-training task: its requirements, the model's inputs, and its token counts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import (
    Batch,
    Claim,
    Layout,
    LossSum,
    RoleSpec,
    RunConfig,
    RunContext,
)
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.tasks.pretrain import Pretrain, PretrainConfig
from ascend_run.types.config import DataSection, TrainSection
from tests.support.tiny_configs import model_fields, parallel_fields
from tests.support.token_files import WriteDataset


def run_config(eval_interval: int = 0, train_iters: int = 1, **data: Any) -> RunConfig:
    return RunConfig(
        model=model_fields(),
        parallel=parallel_fields(),
        data=DataSection(**data),
        train=TrainSection(eval_interval=eval_interval, train_iters=train_iters),
    )


def context_of(config: RunConfig) -> RunContext:
    return RunContext(config=config, layout=Layout(), device=None, groups=None)


@pytest.fixture
def hooks() -> Hooks:
    return Hooks([Pretrain(PretrainConfig())])


@pytest.fixture
def task(hooks: Hooks) -> Any:
    return hooks.require("ascend_task", config=run_config(train=("a",)))


def problems(hooks: Hooks, config: RunConfig) -> list[str]:
    results = hooks.contributions("ascend_check", config=config, layout=Layout())
    return [problem for _, found in results for problem in found]


def test_it_claims_the_task_and_trains_one_model(task: Any) -> None:
    assert claims_of(Pretrain) == (Claim.TASK,)
    assert task.roles == (RoleSpec(name="policy"),)
    assert set(task.batch_fields) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert {field.axes for field in task.batch_fields.values()} == {("batch", "sequence")}


def test_it_reads_the_data_that_the_config_names(task: Any, write_dataset: WriteDataset) -> None:
    files = [write_dataset([[n] * 9], f"file{n}") for n in range(3)]
    data: dict[str, Any] = {"train": (*files[:2],), "seq_length": 4}
    held_out = {"validation": (files[2],), "validation_weights": (2.0,)}
    config = run_config(**data, train_weights=(1.0, 3.0), **held_out)
    both = task.datasets(context_of(config), 10, 5)
    for blend, prefixes, weights, length in (
        (both.train, files[:2], (1.0, 3.0), 10),
        (both.validation, files[2:], (2.0,), 5),
    ):
        assert [stream.prefix for stream in blend.datasets] == prefixes
        assert [len(stream) for stream in blend.datasets] == [length] * len(prefixes)
        assert blend.weights == weights
    alone = task.datasets(context_of(run_config(**data)), 10, 0)
    assert alone.validation is None
    assert alone.train.weights == (9.0, 9.0)  # in proportion to their tokens


class Recording(nn.Module):
    """Returns given values, and records what it was called with."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result
        self.called_with: dict[str, torch.Tensor] = {}

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        self.called_with = tensors
        return self.result


@pytest.fixture
def batch(task: Any) -> Batch:
    return Batch(
        tensors={
            "tokens": torch.tensor([[1, 2, 3], [4, 5, 6]]),
            "labels": torch.tensor([[2, 3, 4], [5, 6, 7]]),
            "loss_mask": torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
            "position_ids": torch.arange(3).expand(2, 3),
        },
        fields=task.batch_fields,
    )


def test_on_the_last_stage_the_loss_is_a_sum_over_the_tokens_that_count(
    task: Any, batch: Batch
) -> None:
    loss = torch.tensor(7.0, requires_grad=True)
    model = Recording(loss)
    result = task.forward_step(context_of(run_config()), model, batch)
    assert isinstance(result, LossSum)
    assert result.sum is loss
    assert result.count.item() == 5
    assert result.count.dtype == torch.int64
    assert model.called_with.pop("document_ends") is None
    assert model.called_with.pop("attention_mask") is None
    assert {name: id(tensor) for name, tensor in model.called_with.items()} == {
        "input_ids": id(batch.tensors["tokens"]),
        "position_ids": id(batch.tensors["position_ids"]),
        "labels": id(batch.tensors["labels"]),
        "loss_mask": id(batch.tensors["loss_mask"]),
    }


def test_on_the_other_stages_the_hidden_state_passes(task: Any, batch: Batch) -> None:
    hidden = torch.zeros(3, 2, 8)
    assert task.forward_step(context_of(run_config()), Recording(hidden), batch) is hidden


def test_sound_data_options_raise_no_problem(hooks: Hooks) -> None:
    config = run_config(
        eval_interval=5, train=("a", "b"), train_weights=(0.5, 0.5), validation=("c",)
    )
    assert problems(hooks, config) == []
    assert problems(hooks, run_config(train_iters=0)) == []


def test_data_that_is_missing_is_named_with_the_way_out(hooks: Hooks) -> None:
    no_data = problems(hooks, run_config(eval_interval=5))
    assert [problem.split(" is ")[0] for problem in no_data] == [
        "pretrain: data.train",
        "pretrain: train.eval_interval",
    ]


def test_importing_and_checking_it_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from ascend_run.plugins.tasks.pretrain import Pretrain, PretrainConfig\n"
        "from ascend_run.plugin_api import RunConfig\n"
        "from tests.support.tiny_configs import model_fields, parallel_fields\n"
        "config = RunConfig(model=model_fields(), parallel=parallel_fields())\n"
        "assert Pretrain(PretrainConfig()).ascend_check(config)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
