"""Execute a trial on one rank: gradients, or steps and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from ascend_run.core.config.attention_needs import needed_features
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.effects import CollectiveCall, count_both
from ascend_run.testing.runtime import RankOutcome, Shard, Trial

if TYPE_CHECKING:
    from ascend_run.core.train.step import ForwardBackward
    from ascend_run.testing.gradients.differences import Derivative
    from ascend_run.testing.gradients.functions import FunctionCall
    from ascend_run.types.data import Samples


@attrs.define
class _Counts:
    """Operations and collectives of the last forward and backward."""

    operations: Mapping[str, int] = attrs.field(factory=dict)
    calls: Mapping[str, int] = attrs.field(factory=dict)
    sent_bytes: Mapping[str, int] = attrs.field(factory=dict)
    collective_calls: Sequence[CollectiveCall] = ()

    @contextmanager
    def watch(self) -> Iterator[None]:
        with count_both() as (operations, collectives):
            yield
        self.operations = Counter(operations)
        self.calls, self.sent_bytes = collectives.calls, collectives.sent_bytes
        self.collective_calls = tuple(collectives.collective_calls)


class TrialWork:
    """One trial on one rank, whose process groups and device exist."""

    def __init__(self, trial: Trial, hooks: Hooks, context: c.RunContext) -> None:
        from ascend_run.testing.attention_use import AttentionUse
        from ascend_run.testing.dry_run import DryRun

        self.attention = None if trial.steps else AttentionUse()
        recorders = [] if self.attention is None else [self.attention]
        self.hooks = Hooks([*recorders, *hooks.plugins])
        self.trial, self.context = trial, context
        # At a tie the loss jumps, and differences show no slope.
        self.dry_run = DryRun(self.hooks, context, probe_weights=trial.probe_weights)
        self.counts = _Counts()

    def gradients(self) -> RankOutcome:
        """Compute loss and gradients of the first global batch, in the trial's dtype."""
        from ascend_run.testing.dry_run import gradient_of

        forward_backward = self.dry_run.for_gradients(getattr(torch, self.trial.dtype))
        self.dry_run.load_weights()
        if not self.trial.by_differences:
            loss = self.dry_run.gradients(forward_backward, self._batches(1), self._watch()).loss
            return self._outcome([loss], [], gradient_of)
        from ascend_run.testing.gradients.functions import recorded_calls, recorded_estimates

        with recorded_calls() as calls, recorded_estimates() as estimates:
            loss = self.dry_run.gradients(forward_backward, self._batches(1), self._watch()).loss
        outcome = self._outcome([loss], [], gradient_of)
        found = self._by_differences(forward_backward, calls)
        return attrs.evolve(
            outcome,
            derivatives=tuple(found),
            estimated=tuple(estimates),
            attention_errors=self._attention_errors(),
        )

    def _attention_errors(self) -> dict[str, float]:
        from ascend_run.testing.gradients.formula import kernel_errors
        from ascend_run.testing.gradients.kernels import first_kernel

        if "formula" not in self.trial.by_differences:
            return {}
        return kernel_errors(first_kernel(self.dry_run.bundle))

    def _by_differences(
        self, forward_backward: ForwardBackward, calls: list[FunctionCall]
    ) -> Iterator[Derivative]:
        from ascend_run.testing.gradients.functions import function_derivatives
        from ascend_run.testing.gradients.kernels import first_kernel, kernel_derivatives
        from ascend_run.testing.gradients.parameters import parameter_derivatives

        parts = self.trial.by_differences
        if "attention" in parts:
            yield from kernel_derivatives(first_kernel(self.dry_run.bundle))
        if "functions" in parts:
            yield from function_derivatives(calls)
        if "parameters" in parts:
            yield from parameter_derivatives(self.dry_run, forward_backward, self._samples(1))

    def train(self) -> RankOutcome:
        """Run the steps; resume from and save to checkpoints if the trial has a folder for them."""
        from ascend_run.core.run_end import notifying_listeners

        from .trial_loop import NO_LOG

        self.dry_run.build()
        if not self.trial.checkpoints:
            self.dry_run.load_weights()
            return self._steps()
        with notifying_listeners(self.hooks, self.context, NO_LOG):
            return self._loop(Path(self.trial.checkpoints))

    def _loop(self, folder: Path) -> RankOutcome:
        from ascend_run.core.train.checkpointing import Checkpoints

        from .trial_loop import NO_LOG, StepReadings, training_loop

        folder.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(self.hooks, self.context, folder)
        checkpoints.restore(NO_LOG)
        recorder, steps = StepReadings(), self.trial.steps
        loop = training_loop(
            self.dry_run,
            steps,
            self._samples(steps),
            checkpoints,
            recorder,
            evaluates=self.trial.evaluates,
        )
        self.hooks.event("ascend_before_run")(context=self.context)
        loop.run()
        with checkpoints.state() as (shards, values):
            state = {f"{p.key} {p.offset}": p.tensor.detach().clone() for p in shards}
        return attrs.evolve(
            self._outcome(recorder.losses, recorder.grad_norms, Tensor.detach),
            state=state,
            values=values,
            readings=recorder.of_plugins(),
        )

    def _steps(self) -> RankOutcome:
        from ascend_run.core.train.data_parallel import gather_parameters

        step, batches = self.dry_run.train_step(), self._batches(self.trial.steps)
        losses, norms = [], []
        while self.context.step < self.trial.steps:
            is_last = self.context.step == self.trial.steps - 1
            result = self.dry_run.step(step, batches, self._watch() if is_last else None)
            losses.append(result.loss)
            norms.append(float("nan") if result.grad_norm is None else result.grad_norm)
        gather_parameters(self.dry_run.bundle)
        return self._outcome(losses, norms, Tensor.detach)

    def _watch(self) -> AbstractContextManager[None] | None:
        return self.counts.watch() if self.trial.counted else None

    def _batches(self, num_global_batches: int) -> Iterator[c.Batch]:
        """Yield the remaining micro-batches of the given number of global batches."""
        return self.dry_run.batches(self._samples(num_global_batches))

    def _samples(self, num_global_batches: int) -> Samples:
        dataset = self.dry_run.samples(
            num_global_batches * self.context.config.train.global_batch_size
        )
        assert dataset is not None, "the trial has no steps"
        return dataset

    def _outcome(
        self,
        losses: Sequence[float],
        norms: Sequence[float],
        read: Callable[[Tensor], Tensor | None],
    ) -> RankOutcome:
        return RankOutcome(
            losses=tuple(losses),
            grad_norms=tuple(norms),
            shards=tuple(
                Shard(
                    name=held.name,
                    tensor=None if held.tensor is None else held.tensor.clone(),
                    offset=held.offset,
                    global_shape=held.global_shape,
                )
                for held in self.dry_run.shards(read)
                if held.trains
            ),
            collectives=self.counts.calls,
            sent_bytes=self.counts.sent_bytes,
            collective_calls=self.counts.collective_calls,
            operations=self.counts.operations,
            undeclared_attention=self._undeclared_attention(),
            metrics=self._metrics(),
        )

    def _undeclared_attention(self) -> frozenset[str]:
        if self.attention is None:
            return frozenset()
        config = self.context.config
        declared = [plugin.manifest.attention_needs for plugin in self.hooks.plugins]
        needed = needed_features(config, declared)
        if config.model.multi_latent_attention:
            needed |= {"unequal_widths"}
        return frozenset(self.attention.features) - needed

    def _metrics(self) -> dict[str, float]:
        groups = self.hooks.merge("ascend_metrics", context=self.context)
        return {
            f"{group}/{name}": value
            for group, metrics in groups.items()
            for name, value in metrics(self.context).items()
        }
