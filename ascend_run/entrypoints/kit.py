"""The conformance kit's runtime: a trial goes the way that a run goes, up to where it stops."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.core.config.raw import Given, RawConfig
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Numerics
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import count_collectives, count_operations
from ascend_run.plugin_api.testing.models import samples
from ascend_run.plugin_api.testing.runtime import Piece, RankOutcome, Trial
from ascend_run.registry.discovery import discover

from .planning import Prepared, prepare_raw

ORIGIN = "the trial"
PLATFORM_VARIABLE = "ASCEND_RUN_TEST_PLATFORM"
"""Names the platform of trials that name none."""


class KitRuntime:
    """testing.runtime.Runtime on our own core."""

    def numerics_of(self, plugin: str) -> Numerics:
        """What a plugin's manifest declares.

        Raises:
            AscendRunError: It is unknown, or cannot be imported.
        """
        numerics: Numerics = discover().load([plugin])[plugin].manifest.numerics
        return numerics

    def run(self, trial: Trial) -> RankOutcome:
        from ascend_run.core.run import RunRequest, prepared_rank, seed_everything

        with _rank_environment():
            prepared = _prepare(trial)
            request = RunRequest(
                config=prepared.config,
                config_toml="",
                plugins=prepared.instances(),
                plan=prepared.plan,
                lock=prepared.lock,
            )
            with prepared_rank(request) as (hooks, context):
                seed_everything(context.config, context.layout)
                work = _Work(trial, hooks, context)
                return work.train() if trial.steps else work.gradients()


def _prepare(trial: Trial) -> Prepared:
    # The batches are the kit's; a run must name a dataset all the same.
    platform = os.environ.get(PLATFORM_VARIABLE, "cpu")
    given = {"data.train": ["the-kit"], "platform": platform, **trial.config}
    values = {**given, "enable": list(trial.plugins)}
    raw = RawConfig(values={key: Given(value, ORIGIN) for key, value in values.items()})
    return prepare_raw(raw, world_size=dist.get_world_size())


@contextmanager
def _rank_environment() -> Iterator[None]:
    """The variables that a launcher would have set for this rank."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    before = dict(os.environ)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@attrs.define
class _Counts:
    """What the last forward and backward did."""

    operations: Mapping[str, int] = attrs.field(factory=dict)
    calls: Mapping[str, int] = attrs.field(factory=dict)
    sent_bytes: Mapping[str, int] = attrs.field(factory=dict)

    @contextmanager
    def watch(self) -> Iterator[None]:
        with count_operations() as operations, count_collectives() as collectives:
            yield
        self.operations = Counter(operations)
        self.calls, self.sent_bytes = collectives.calls, collectives.sent_bytes


class _Work:
    """One trial on one rank, its groups and device standing."""

    def __init__(self, trial: Trial, hooks: Hooks, context: c.RunContext) -> None:
        from ascend_run.core.run import batch_plan

        self.trial, self.hooks, self.context = trial, hooks, context
        self.config = context.config
        self.task: c.Task = hooks.require("ascend_task", config=self.config)
        self.role = self.task.roles[0]
        self.plan = batch_plan(self.config, context.layout)
        self.counts = _Counts()

    def gradients(self) -> RankOutcome:
        """Loss and gradients of the first global batch, in the trial's dtype."""
        from ascend_run.core.model.build import build_model
        from ascend_run.core.train.data_parallel import wrap_data_parallel
        from ascend_run.core.train.step import ForwardBackward, connect_schedule

        bundle = build_model(
            self.config,
            self.hooks,
            self.context.groups,
            self.context.device,
            role=self.role,
            dtype=getattr(torch, self.trial.dtype),
        )
        self.context.models[self.role] = bundle
        wrap_data_parallel(
            bundle, self.config, self.hooks, self.context.groups, self.plan.num_micro_batches
        )
        connect_schedule(bundle)
        forward_backward = ForwardBackward(self.context, self.task, self.hooks, self.role)
        forward_backward.force_all_reduce = True  # or a rank would hold a part of the gradient
        self.hooks.event("ascend_before_step")(context=self.context)
        with self.counts.watch():
            loss, _ = forward_backward(self._batches(1), self.plan.num_micro_batches)
        return self._outcome([loss], [], _gradient)

    def train(self) -> RankOutcome:
        """Losses of the steps, and the weights after them."""
        from ascend_run.core.run import build_models
        from ascend_run.core.train.data_parallel import gather_parameters
        from ascend_run.core.train.step import TrainStep

        build_models(self.task, self.hooks, self.context, self.plan.num_micro_batches)
        step = TrainStep(self.context, self.task, self.hooks, self.role)
        before, after = (
            self.hooks.event("ascend_before_step"),
            self.hooks.event("ascend_after_step"),
        )
        batches = self._batches(self.trial.steps)
        losses, norms = [], []
        for index in range(self.trial.steps):
            before(context=self.context)
            if index < self.trial.steps - 1:
                result = step(batches, self.plan.num_micro_batches)
            else:
                with self.counts.watch():
                    result = step(batches, self.plan.num_micro_batches)
            self.context.step += 1
            self.context.consumed_samples += self.config.train.global_batch_size
            after(context=self.context)
            losses.append(result.loss)
            norms.append(float("nan") if result.grad_norm is None else result.grad_norm)
        gather_parameters(self.context.models[self.role])
        return self._outcome(losses, norms, torch.Tensor.detach)

    def _batches(self, num_global_batches: int) -> Iterator[c.Batch]:
        from ascend_run.core.data.batches import micro_batches
        from ascend_run.core.train.batches import cut_to_rank

        count = num_global_batches * self.config.train.global_batch_size
        dataset = samples(self.trial.config, count)
        source = micro_batches(dataset, self.task.batch_fields, self.plan)
        wrapped = self.hooks.wrap("ascend_batch", source, config=self.config)
        return cut_to_rank(wrapped, self.hooks, self.context)

    def _outcome(
        self, losses: list[float], norms: list[float], read: Callable[[Tensor], Tensor | None]
    ) -> RankOutcome:
        from ascend_run.core.checkpoint.boxes import whole
        from ascend_run.core.checkpoint.regions import sharded_tensors

        pieces, missing = [], []
        chunks = self.context.models[self.role].chunks
        for held in sharded_tensors(chunks, vocab_size=self.config.model.vocab_size):
            if not held.tensor.requires_grad:
                continue
            value = read(held.tensor)
            for region in held.regions:
                if value is None:
                    missing.append(region.key)
                    continue
                part = value[region.local.slices_in(whole(held.tensor.shape))]
                piece = region.piece("", part, region.local, writes=True)
                pieces.append(
                    Piece(
                        name=region.key,
                        tensor=piece.tensor.clone(),
                        offset=piece.offset,
                        global_shape=piece.global_shape,
                    )
                )
        return RankOutcome(
            losses=tuple(losses),
            grad_norms=tuple(norms),
            pieces=tuple(pieces),
            missing=tuple(missing),
            collectives=self.counts.calls,
            sent_bytes=self.counts.sent_bytes,
            operations=self.counts.operations,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        groups = self.hooks.merge("ascend_metrics", context=self.context)
        return {
            f"{group}/{name}": value
            for group, metrics in groups.items()
            for name, value in metrics(self.context).items()
        }


def _gradient(parameter: Tensor) -> Tensor | None:
    """Where Megatron's data parallelism left it, or autograd."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
