"""A trial of the conformance kit on one rank: gradients, or steps and their checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import SentMessage, count_collectives, count_operations
from ascend_run.plugin_api.testing.models import samples
from ascend_run.plugin_api.testing.runtime import Piece, RankOutcome, Trial


@attrs.define
class _Counts:
    """What the last forward and backward did."""

    operations: Mapping[str, int] = attrs.field(factory=dict)
    calls: Mapping[str, int] = attrs.field(factory=dict)
    sent_bytes: Mapping[str, int] = attrs.field(factory=dict)
    messages: Sequence[SentMessage] = ()

    @contextmanager
    def watch(self) -> Iterator[None]:
        with count_operations() as operations, count_collectives() as collectives:
            yield
        self.operations = Counter(operations)
        self.calls, self.sent_bytes = collectives.calls, collectives.sent_bytes
        self.messages = tuple(collectives.messages)


class TrialWork:
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
        """Losses of the steps, and the weights after them; from a checkpoint and to one where the
        trial names a folder."""
        from ascend_run.core.outcome import told_to_listeners
        from ascend_run.core.run import build_models
        from ascend_run.core.train.checkpointing import Checkpoints

        build_models(self.task, self.hooks, self.context, self.plan.num_micro_batches)
        if not self.trial.checkpoints:
            return self._steps()
        folder = Path(self.trial.checkpoints)
        folder.mkdir(parents=True, exist_ok=True)
        with told_to_listeners(self.hooks, self.context, _NO_LOG):
            checkpoints = Checkpoints(self.hooks, self.context, folder)
            checkpoints.restore(_NO_LOG)
            self.hooks.event("ascend_before_run")(context=self.context)
            outcome = self._steps()
            path = checkpoints.save()
            self.hooks.event("ascend_after_checkpoint")(context=self.context, path=path)
            pieces, values = checkpoints.state()
        state = {f"{p.key} {p.offset}": p.tensor.detach().clone() for p in pieces}
        return attrs.evolve(outcome, state=state, values=values)

    def _steps(self) -> RankOutcome:
        from ascend_run.core.train.data_parallel import gather_parameters
        from ascend_run.core.train.step import TrainStep

        step = TrainStep(self.context, self.task, self.hooks, self.role)
        before, after = (
            self.hooks.event("ascend_before_step"),
            self.hooks.event("ascend_after_step"),
        )
        batches = self._batches(self.trial.steps)
        losses, norms = [], []
        while self.context.step < self.trial.steps:
            before(context=self.context)
            if self.context.step < self.trial.steps - 1:
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
        """What is left of so many global batches."""
        from ascend_run.core.data.batches import micro_batches
        from ascend_run.core.train.batches import cut_to_rank

        count = num_global_batches * self.config.train.global_batch_size
        dataset = samples(self.trial.config, count)
        source = micro_batches(
            dataset, self.task.batch_fields, self.plan, self.context.consumed_samples
        )
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
            messages=self.counts.messages,
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


class _NoLog:
    """A log that nobody reads."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **fields: None


_NO_LOG: Any = _NoLog()
