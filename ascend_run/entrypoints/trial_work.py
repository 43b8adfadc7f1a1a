"""A trial of the conformance kit on one rank: gradients, or steps and their checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import SentMessage, count_both
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
        with count_both() as (operations, collectives):
            yield
        self.operations = Counter(operations)
        self.calls, self.sent_bytes = collectives.calls, collectives.sent_bytes
        self.messages = tuple(collectives.messages)


class TrialWork:
    """One trial on one rank, its groups and device standing."""

    def __init__(self, trial: Trial, hooks: Hooks, context: c.RunContext) -> None:
        from ascend_run.core.train.rehearsal import Rehearsal

        self.trial, self.hooks, self.context = trial, hooks, context
        self.rehearsal = Rehearsal(hooks, context)
        self.counts = _Counts()

    def gradients(self) -> RankOutcome:
        """Loss and gradients of the first global batch, in the trial's dtype."""
        from ascend_run.core.train.rehearsal import gradient_of

        forward_backward = self.rehearsal.for_gradients(getattr(torch, self.trial.dtype))
        loss, _ = self.rehearsal.gradients(forward_backward, self._batches(1), self._watch())
        return self._outcome([loss], [], gradient_of)

    def train(self) -> RankOutcome:
        """Losses of the steps, and the weights after them; from a checkpoint and to one where the
        trial names a folder."""
        from ascend_run.core.outcome import told_to_listeners
        from ascend_run.core.train.checkpointing import Checkpoints

        self.rehearsal.build()
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

        step, batches = self.rehearsal.train_step(), self._batches(self.trial.steps)
        losses, norms = [], []
        while self.context.step < self.trial.steps:
            is_last = self.context.step == self.trial.steps - 1
            result = self.rehearsal.step(step, batches, self._watch() if is_last else None)
            losses.append(result.loss)
            norms.append(float("nan") if result.grad_norm is None else result.grad_norm)
        gather_parameters(self.rehearsal.bundle)
        return self._outcome(losses, norms, Tensor.detach)

    def _watch(self) -> AbstractContextManager[None] | None:
        return self.counts.watch() if self.trial.counted else None

    def _batches(self, num_global_batches: int) -> Iterator[c.Batch]:
        """What is left of so many global batches."""
        count = num_global_batches * self.context.config.train.global_batch_size
        return self.rehearsal.batches(samples(self.trial.config, count))

    def _outcome(
        self, losses: list[float], norms: list[float], read: Callable[[Tensor], Tensor | None]
    ) -> RankOutcome:
        return RankOutcome(
            losses=tuple(losses),
            grad_norms=tuple(norms),
            pieces=tuple(
                Piece(
                    name=held.name,
                    tensor=None if held.tensor is None else held.tensor.clone(),
                    offset=held.offset,
                    global_shape=held.global_shape,
                )
                for held in self.rehearsal.pieces(read)
                if held.trains
            ),
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


class _NoLog:
    """A log that nobody reads."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **fields: None


_NO_LOG: Any = _NoLog()
