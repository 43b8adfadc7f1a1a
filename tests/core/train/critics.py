"""A task with two models that train: a policy, and a critic with a score head beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ascend_run.plugin_api import Batch, LossSum, RoleSpec, RunContext
from ascend_run.plugins.tasks.pretrain import PretrainConfig
from ascend_run.plugins.tasks.pretrain.task import PretrainTask
from ascend_run.testing.runtime import Shard
from tests.support.probed_runs import probe, train
from tests.support.small_runs import rank_environment, standing_rank

HEAD: Mapping[str, object] = {"num_labels": 1, "share_embeddings_and_output_weights": False}


def values_of(context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
    """The squared distance of each trained position's score from a number of its token."""
    tokens, mask = batch.tensors["tokens"], batch.tensors["loss_mask"]
    output: Tensor = model(
        input_ids=tokens, position_ids=batch.tensors["position_ids"], loss_mask=mask
    )
    if output.dim() != 2:
        return output
    wanted_P = (tokens % 7).t()[mask.t() > 0].to(output.dtype) / 7
    loss = (output.squeeze(1) - wanted_P).square().sum()
    return LossSum(loss, mask.gt(0).sum())


CRITIC = RoleSpec(name="critic", model=HEAD, forward_step=values_of)


class WithCritic(PretrainTask):
    """Pretraining, and a critic on the same tokens."""

    roles: Sequence[RoleSpec] = (RoleSpec(name="policy"), CRITIC)

    def __init__(self) -> None:
        super().__init__(PretrainConfig())


class CriticAlone(WithCritic):
    """The critic as the only model of a run."""

    roles = (RoleSpec(name="policy", model=HEAD),)

    def forward_step(self, context: RunContext, model: nn.Module, batch: Batch) -> Tensor | LossSum:
        return values_of(context, model, batch)


def task_probe(task: Any) -> Any:
    """A plugin that gives a run this task."""
    return probe("ascend_task", lambda self: task, "critics")


def weights_at_checkpoints(folder: Path, values: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Train both models; return the critic's weights on this rank at each checkpoint. A job for the
    pool."""
    found: list[dict[str, Tensor]] = []

    def note(self: Any, context: RunContext) -> None:
        (chunk,) = context.models["critic"].chunks
        module: Any = chunk.module
        found.append({name: p.detach().clone() for name, p in module.named_parameters()})

    noting = probe("ascend_after_checkpoint", note, "noting")
    with rank_environment():
        train(folder, task_probe(WithCritic()), noting, values=values)
    return found


def gradients(values: Mapping[str, Any]) -> dict[str, list[Shard]]:
    """Return this rank's shards of the gradients of both models, in float64. A job for the pool."""
    from ascend_run.core.hooks import Hooks
    from ascend_run.core.train.step import ForwardBackward, connect_schedule
    from ascend_run.testing.dry_run import DryRun, gradient_of
    from ascend_run.testing.models import samples
    from ascend_run.testing.parameter_shards import parameter_shards

    found, vocab_size = {}, values["model.vocab_size"]
    with standing_rank(values) as (hooks, context):
        hooks = Hooks([task_probe(WithCritic()), *hooks.plugins])  # provides before the run's task
        dry_run = DryRun(hooks, context)
        dry_run.build(torch.float64, with_optimizer=False)
        data = samples(values, values["train.global_batch_size"])
        for role in ("policy", "critic"):
            bundle = context.models[role]
            connect_schedule(bundle)
            run = ForwardBackward(context, dry_run.task, hooks, role, force_all_reduce=True)
            dry_run.gradients(run, dry_run.batches(data, first=0))
            found[role] = [
                Shard(
                    name=shard.name,
                    tensor=None if shard.tensor is None else shard.tensor.clone(),
                    offset=shard.offset,
                    global_shape=shard.global_shape,
                )
                for shard in parameter_shards(bundle.chunks, vocab_size, gradient_of)
                if shard.is_parameter
            ]
    return found
