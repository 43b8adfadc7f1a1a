"""Two models that train in one run: each as if it were alone, in every layout, and resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.core.train.models import require_roles
from ascend_run.plugin_api import CheckpointError, HookError, RoleSpec
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import assemble, differences
from tests.support.probed_runs import Run, train
from tests.support.small_runs import prepare
from tests.support.tiny_llama import write_llama
from tests.support.tokens import write_tokens

from .critics import (
    CRITIC,
    CriticAlone,
    WithCritic,
    gradients,
    task_probe,
    weights_at_checkpoints,
)

RUN: Mapping[str, Any] = {
    "train.train_iters": 4,
    "train.global_batch_size": 2,
    "train.log_interval": 1,
    "optimizer.lr": 1e-2,
    "optimizer.lr_decay_iters": 4,
    "optimizer.clip_grad": 1.0,
}


def ended(folder: Path, task: Any, **values: Any) -> Run:
    folder.mkdir(exist_ok=True)
    given = {**RUN, **{name.replace("__", "."): value for name, value in values.items()}}
    return train(folder, task_probe(task), values=given)


def weights(run: Run, role: str) -> dict[str, Tensor]:
    (chunk,) = run.context.models[role].chunks
    return {name: value.detach() for name, value in chunk.module.named_parameters()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ended(tmp_path_factory.mktemp("both"), WithCritic(), checkpoint__save_interval=2)


def test_each_trains_as_if_it_were_alone(both: Run, tmp_path: Path) -> None:
    policy = train(tmp_path, values=RUN)
    critic = ended(tmp_path / "critic", CriticAlone())
    assert_equal(weights(both, "policy"), weights(policy, "policy"))
    assert_equal(weights(both, "critic"), weights(critic, "policy"))
    assert "score.weight" in weights(both, "critic")
    for line, one, other in zip(both.readings(), policy.readings(), critic.readings(), strict=True):
        assert (line["loss"], line["grad_norm"]) == (one["loss"], one["grad_norm"])
        assert line["critic loss"] == other["loss"]
        assert line["critic grad_norm"] == other["grad_norm"]


def test_a_run_in_two_halves_is_the_run_in_one(both: Run, tmp_path: Path) -> None:
    ended(tmp_path, WithCritic(), train__train_iters=2, checkpoint__save_interval=2)
    again = ended(tmp_path, WithCritic(), checkpoint__save_interval=2)
    assert again.context.step == 4
    for role in ("policy", "critic"):
        assert_equal(weights(again, role), weights(both, role))
    assert again.readings()[-1]["critic loss"] == both.readings()[-1]["critic loss"]


def test_checkpoints_have_weights_optimizer_and_schedule_of_both(both: Run) -> None:
    manifest = json.loads(next(both.folder.rglob("*2/manifest.json")).read_text())
    parts = {name.split("/")[0] for name in manifest["tensors"]}
    assert {"model", "model.critic", "optimizer", "optimizer.critic"} <= parts
    progress = manifest["values"]["progress"]
    assert progress["others"] == {"critic": {"schedule_steps": 2, "loss_scalers": []}}
    assert progress["frozen"] == {}


def test_a_checkpoint_without_one_of_them_is_refused(tmp_path: Path) -> None:
    train(tmp_path, values={**RUN, "train.train_iters": 2, "checkpoint.save_interval": 2})
    with pytest.raises(CheckpointError, match="critic"):
        ended(tmp_path, WithCritic(), checkpoint__save_interval=2)


def test_loss_scales_of_both_come_back(tmp_path: Path) -> None:
    half = {"train__precision": "fp16", "optimizer__initial_loss_scale": 8.0}
    half |= {"optimizer__loss_scale_window": 2, "checkpoint__save_interval": 2}
    whole = ended(tmp_path / "whole", WithCritic(), **half)
    ended(tmp_path / "cut", WithCritic(), train__train_iters=2, **half)
    again = ended(tmp_path / "cut", WithCritic(), **half)
    assert_equal(weights(again, "critic"), weights(whole, "critic"))
    assert [line["loss_scale"] for line in whole.readings()] == [8.0, 16.0, 16.0, 32.0]


def test_a_frozen_model_runs_once_for_both(tmp_path: Path) -> None:
    seen: list[str] = []

    def teach(context: Any, model: Any, batch: Any) -> Tensor:
        seen.append("teacher")
        return batch.tensors["tokens"].float()

    def critic(context: Any, model: Any, batch: Any) -> Any:
        assert torch.equal(batch.tensors["teacher"], batch.tensors["tokens"].float())
        assert CRITIC.forward_step is not None
        return CRITIC.forward_step(context, model, batch)

    task: Any = WithCritic()
    small = {"num_layers": 1, "hidden_size": 16}
    teacher = RoleSpec(name="teacher", frozen_step=teach, model=small)
    task.roles = (*task.roles[:1], attrs.evolve(CRITIC, forward_step=critic), teacher)
    run = ended(tmp_path, task, train__train_iters=1)
    assert seen == ["teacher"] * 2  # micro-batches
    assert weights_of_frozen(run) == {16}
    assert run.context.models["teacher"].config.model.num_layers == 1
    assert run.context.config.model.num_layers == 2


def weights_of_frozen(run: Run) -> set[int]:
    (chunk,) = run.context.models["teacher"].chunks
    return {len(norm) for name, norm in chunk.named_parameters() if name.endswith("norm.weight")}


def test_a_role_has_weights_of_its_own(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("one", "other")}
    for seed, folder in enumerate(folders.values()):
        write_llama(Path(folder), seed=seed)
    task: Any = WithCritic()
    task.roles = (task.roles[0], attrs.evolve(CRITIC, weights=folders["other"]))
    values = {"model.hf_path": folders["one"], "train.train_iters": 0}
    values |= {"model.vocab_size": 400, "model.num_attention_heads": 4}
    run = train(tmp_path, task_probe(task), values={**RUN, **values})
    found = {role: weights(run, role) for role in ("policy", "critic")}
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    from safetensors.torch import load_file

    for role, folder in zip(("policy", "critic"), folders.values(), strict=True):
        stored = load_file(Path(folder) / "model.safetensors")
        assert torch.equal(found[role][name], stored["model.layers.0.mlp.down_proj.weight"])


BASE = RoleSpec(name="base", frozen_step=lambda *_: torch.ones(()), is_base=True)
TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
PP = {"parallel.pipeline_model_parallel_size": 2}
EP = {"parallel.expert_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda layout: layout if layout in (TP, PP) else ())
@pytest.mark.parametrize(
    ("model", "layout"),
    [(DENSE, TP), (DENSE, PP), (DENSE, {}), (MOE, EP)],
    ids=["tp sp", "pp", "dp", "ep"],
)
def test_gradients_of_both_are_those_of_one_rank(
    gloo_pool: GlooPool, model: Mapping[str, Any], layout: Mapping[str, Any]
) -> None:
    values = {**model, "model.moe_aux_loss_coeff": 0.0} if model is MOE else model
    one = gloo_pool.run(gradients, 1, values, timeout=100)
    two = gloo_pool.run(gradients, 2, {**values, **layout}, timeout=100)
    for role in ("policy", "critic"):
        expected = assemble(rank[role] for rank in one).tensors
        found = assemble(rank[role] for rank in two).tensors
        assert [*differences(found, expected, 1e-10)] == []
        assert all(bool(value.any()) for name, value in found.items() if "norm" in name), role


def test_weights_of_both_are_gathered_before_they_are_saved(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Those that the next forward would gather; at a checkpoint between steps, and at the end."""
    sharded = {**RUN, "train.train_iters": 2, "checkpoint.save_interval": 1}
    sharded |= {"ddp.use_distributed_optimizer": True}
    late = {"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True}

    def saved(name: str, **values: Any) -> list[list[dict[str, Tensor]]]:
        write_tokens(tmp_path / name)
        return gloo_pool.run(
            weights_at_checkpoints, 2, tmp_path / name, {**sharded, **values}, timeout=100
        )

    at_once = saved("at once")
    for found, expected in zip(saved("late", **late), at_once, strict=True):
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((), "there is none; expected one that trains"),
        ((CRITIC,), "critic: expected the step of the task"),
        ((RoleSpec(name="policy"), RoleSpec(name="critic")), "critic: expected one of forward_s"),
        (
            (RoleSpec(name="policy"), attrs.evolve(CRITIC, frozen_step=lambda *_: torch.ones(()))),
            "critic: expected one of forward_step and frozen_step",
        ),
        ((RoleSpec(name="policy"), attrs.evolve(CRITIC, name="policy")), "expected different nam"),
        (
            (RoleSpec(name="policy", model={"num_heads": 2, "heads": 1}),),
            "policy: [model] has no field heads, num_heads",
        ),
        *(
            ((RoleSpec(name="policy"), attrs.evolve(CRITIC, model={}, **{name: True})), message)
            for name, message in (
                ("is_base", "critic: is_base=True is of a frozen model; expected a frozen_step"),
                ("ahead", "critic: ahead=True is of a frozen model; expected a frozen_step"),
            )
        ),
        ((RoleSpec(name="policy"), attrs.evolve(BASE, weights="there")), "got weights=there"),
        (
            (RoleSpec(name="policy"), attrs.evolve(BASE, model={"num_labels": 1})),
            "base: is_base=True has the [model] of the trained model; expected no fields, got num_",
        ),
        (
            (RoleSpec(name="policy", is_base=True), BASE),
            "policy: is_base=True, but the first role trains; expected another role",
        ),
        (
            (RoleSpec(name="policy", ahead=True),),
            "policy: ahead=True, but the first role trains; expected another role",
        ),
    ],
    ids=[
        *("none", "first with a step", "no step", "two steps", "one name twice", "field"),
        *("trained base", "trained ahead", "base with weights", "base with fields"),
        *("first as base", "first ahead"),
    ],
)
def test_roles_that_cannot_be_built_are_named(roles: tuple[RoleSpec, ...], message: str) -> None:
    config = prepare(DENSE).run_request().config
    with pytest.raises(HookError, match="the roles cannot be built") as error:
        require_roles(roles, config)
    assert any(message in one for one in error.value.problems)


def test_every_contradiction_of_a_role_is_named() -> None:
    config = prepare(DENSE).run_request().config
    role = attrs.evolve(
        BASE, frozen_step=None, ahead=True, weights="there", model={"num_labels": 1}
    )
    with pytest.raises(HookError) as error:
        require_roles((RoleSpec(name="policy"), role), config)
    assert len(error.value.problems) == 5  # with the step that it lacks
    require_roles((RoleSpec(name="policy"), attrs.evolve(BASE, ahead=True)), config)
