"""The training loop: steps, evaluations, checkpoints, metrics and event hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.core.recorder import Recorder
from ascend_run.plugin_api import contracts as c

from .fingerprints import StepFingerprints
from .phases import phase_scope
from .readings import Readings
from .step import StepEvents, evaluate
from .steps import TrainSteps


@attrs.define(kw_only=True)
class Loop:
    """The training loop. :meth:`run` trains up to ``last_step``."""

    context: c.RunContext
    step: TrainSteps
    readings: Readings
    fingerprints: StepFingerprints
    recorder: Recorder
    hooks: Hooks
    train_batches: Iterator[c.Batch]
    validation_batches: Callable[[], Iterator[c.Batch]] | None
    """Returns a new iterator for each evaluation, always from the same first sample."""
    num_microbatches: int
    last_step: int
    save: Callable[[], str] | None
    """Saves a checkpoint and returns its path; None if checkpoints are off."""

    def run(self) -> None:
        """Train from the current step to the last step."""
        config, context, last = self.context.config, self.context, self.last_step
        events = StepEvents(self.hooks, context)
        after_log = self.hooks.event("ascend_after_log")
        if context.step == 0:
            self.fingerprints.add(None)
            self._record_fingerprints()
            self._evaluate()
        self.readings.start()
        while context.step < last:
            with events:
                result = self.step(self.train_batches, self.num_microbatches)
            self.readings.add(result)
            self.fingerprints.add(result)
            done = context.step == last
            if done or context.step % config.train.log_interval == 0:
                readings = self.readings.collect(result)
                self.recorder.readings(readings)
                self._record_fingerprints()
                after_log(context=context, metrics=readings)
            elif self.fingerprints.is_full:
                self._record_fingerprints()
            self.recorder.step_done(context.step)
            with self.readings.untimed():
                if done:
                    self.step.gather()
                if done or _due(context.step, config.train.eval_interval):
                    self._evaluate()
                if self.save and (done or _due(context.step, config.checkpoint.save_interval)):
                    self._save(self.save)

    def _evaluate(self) -> None:
        if self.validation_batches is None:
            return
        self.step.gather()
        self.hooks.event("ascend_before_evaluation")(context=self.context)
        with phase_scope(self.hooks, self.context, c.RunPhase.EVALUATION)():
            found = evaluate(
                self.step.forward_backward,
                self.validation_batches(),
                self.context.config.train.eval_iters,
                self.num_microbatches,
            )
        self.recorder.evaluation(self.context.step, found.loss, found.metrics)
        after = self.hooks.event("ascend_after_evaluation")
        after(context=self.context, loss=found.loss, metrics=found.metrics)

    def _record_fingerprints(self) -> None:
        self.recorder.fingerprints(self.fingerprints.take())

    def _save(self, save: Callable[[], str]) -> None:
        # A run resumed from this checkpoint needs the fingerprint of every step up to here.
        self._record_fingerprints()
        self.step.gather()
        with phase_scope(self.hooks, self.context, c.RunPhase.CHECKPOINT)():
            path = save()
        self.hooks.event("ascend_after_checkpoint")(context=self.context, path=path)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
