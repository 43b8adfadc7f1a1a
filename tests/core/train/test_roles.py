"""A task with a frozen model beside the trained one, and with metrics beside the loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import HookError, RoleSpec, RunPhase
from ascend_run.plugins.tasks.pretrain import PretrainConfig
from ascend_run.plugins.tasks.pretrain.task import PretrainTask
from ascend_run.plugins.tasks.shared.losses import token_losses
from tests.support.probed_runs import probe, train


class Taught(PretrainTask):
    """Pretraining beside a frozen teacher, whose number of tokens is a metric."""

    metrics: Sequence[str] = ("tokens of the teacher", "never counted")

    def __init__(self) -> None:
        super().__init__(PretrainConfig())
        teacher = RoleSpec(name="teacher", frozen_step=self.teach)
        self.roles = (RoleSpec(name="policy"), teacher)
        self.modes: list[tuple[bool, bool]] = []
        self.weights: list[Tensor] = []

    def teach(self, context: Any, model: Any, batch: Any) -> Tensor:
        self.modes.append((model.training, torch.is_grad_enabled()))
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return batch.tensors["tokens"].float()

    def forward_step(self, context: Any, model: Any, batch: Any) -> Any:
        loss = super().forward_step(context, model, batch)
        given = batch.tensors["teacher"]
        assert torch.equal(given, batch.tensors["tokens"].float())
        metrics = {
            "tokens of the teacher": (torch.tensor(float(given.numel())), torch.tensor(1)),
            "never counted": (torch.tensor(7.0), torch.tensor(0)),
        }
        return attrs.evolve(loss, metrics=metrics)


class TaughtByItself(PretrainTask):
    """Pretraining beside the trained model as a frozen one; notes how each forward computes."""

    def __init__(self) -> None:
        super().__init__(PretrainConfig())
        base = RoleSpec(name="base", frozen_step=self.teach, is_base=True)
        self.roles = (RoleSpec(name="policy"), base)
        self.modes: list[tuple[str, set[bool]]] = []
        self.losses: dict[str, list[float]] = {"base": [], "policy": []}

    def teach(self, context: Any, model: Any, batch: Any) -> Tensor:
        self.modes.append(("base", {module.training for module in model.modules()}))
        losses = token_losses(model, batch)
        self.losses["base"].append(losses.sum().item())
        return losses

    def forward_step(self, context: Any, model: Any, batch: Any) -> Any:
        self.modes.append(("policy", {module.training for module in model.modules()}))
        loss = super().forward_step(context, model, batch)
        self.losses["policy"].append(loss.sum.item())
        return loss


def lines(folder: Path) -> list[dict[str, Any]]:
    (metrics,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def run(folder: Path, task: Any, *more: Any, **values: Any) -> None:
    given = {
        "train.train_iters": 2,
        "train.global_batch_size": 2,
        "train.eval_interval": 2,
        "train.eval_iters": 1,
        "train.log_interval": 1,
        "data.validation": [str(folder / "tokens")],
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    train(folder, probe("ascend_task", lambda self: task, "taught"), *more, values=given)


def test_a_frozen_model_runs_on_every_micro_batch_before_the_trained_one(tmp_path: Path) -> None:
    task, phases = Taught(), []

    def around(self: Any, phase: RunPhase) -> Any:
        @contextmanager
        def scope() -> Iterator[None]:
            phases.append(phase)
            yield

        return scope

    run(tmp_path, task, probe("ascend_phase", around, "around"))
    # Two evaluations and two steps, of two micro-batches each.
    assert task.modes == [(False, False)] * 8
    assert phases.count(RunPhase.REFERENCE) == 4
    step = [RunPhase.REFERENCE, *[RunPhase.FORWARD, RunPhase.BACKWARD] * 2]
    start = phases.index(RunPhase.BACKWARD) - 2
    assert phases[start : start + 5] == step
    assert all(torch.equal(weights, task.weights[0]) for weights in task.weights)


def test_a_trained_model_as_the_frozen_one_computes_without_dropout(tmp_path: Path) -> None:
    def taught(name: str, **values: Any) -> TaughtByItself:
        task = TaughtByItself()
        (tmp_path / name).mkdir()
        run(tmp_path / name, task, train__eval_interval=0, **values)
        return task

    dropout = {"model__hidden_dropout": 0.5, "model__attention_dropout": 0.5}
    task, plain = taught("dropout", **dropout), taught("plain")
    assert task.modes == [*[("base", {False})] * 2, *[("policy", {True})] * 2] * 2
    first = slice(0, 2)  # micro-batches of the first step
    assert task.losses["base"][first] == plain.losses["base"][first]
    assert plain.losses["policy"][first] == pytest.approx(plain.losses["base"][first], rel=1e-6)
    assert task.losses["policy"][first] != pytest.approx(task.losses["base"][first], rel=1e-3)


def test_a_frozen_model_is_not_saved(tmp_path: Path) -> None:
    run(tmp_path, Taught(), checkpoint__save_interval=2)
    (manifest,) = tmp_path.rglob("manifest.json")
    saved = json.loads(manifest.read_text())
    assert any("decoder.layers" in name for name in saved["tensors"])
    assert not any("teacher" in name for name in saved["tensors"])
    assert {*saved["values"]["progress"]["frozen"]} == {"teacher"}


def test_metrics_are_means_of_what_was_counted(tmp_path: Path) -> None:
    run(tmp_path, Taught())
    steps = [line for line in lines(tmp_path) if "loss" in line]
    evaluations = [line for line in lines(tmp_path) if "eval_loss" in line]
    assert [line["tokens of the teacher"] for line in steps] == [16.0, 16.0]
    assert [line["eval_tokens of the teacher"] for line in evaluations] == [16.0, 16.0]
    assert not [line for line in steps if "never counted" in line]


def test_other_metrics_than_the_declared_ones_are_an_error(tmp_path: Path) -> None:
    class Undeclared(Taught):
        metrics = ("tokens of the teacher",)

    with pytest.raises(HookError, match="came with the metrics never counted, tokens of the"):
        run(tmp_path, Undeclared())
