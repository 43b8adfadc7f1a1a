"""The training loop of a trial with checkpoints: that of a run, on the kit's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.core.fingerprint.reading import RowHashes
from ascend_run.core.recorder import Recorder
from ascend_run.core.train.checkpointing import Checkpoints
from ascend_run.core.train.fingerprints import StepFingerprints
from ascend_run.core.train.loop import Loop
from ascend_run.core.train.readings import Readings
from ascend_run.testing.dry_run import DryRun

if TYPE_CHECKING:
    from ascend_run.types.data import Samples


class _NoLog:
    """A log that discards everything."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **fields: None


NO_LOG: Any = _NoLog()


@attrs.define
class StepReadings(Recorder):
    """Keeps what a run logs at each step, on every rank."""

    steps: list[Mapping[str, Any]] = attrs.field(factory=list)

    def readings(self, readings: Mapping[str, Any]) -> None:
        self.steps.append(readings)

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(readings["loss"] for readings in self.steps)

    @property
    def grad_norms(self) -> tuple[float, ...]:
        norms = (readings["grad_norm"] for readings in self.steps)
        return tuple(float("nan") if norm is None else norm for norm in norms)

    def of_plugins(self) -> tuple[Mapping[str, Any], ...]:
        """Return what plugins added to the log, by ``<group>/<name>``."""
        return tuple({k: v for k, v in step.items() if "/" in k} for step in self.steps)


def training_loop(
    dry_run: DryRun,
    last_step: int,
    dataset: Samples,
    checkpoints: Checkpoints,
    recorder: StepReadings,
    *,
    evaluates: bool,
) -> Loop:
    """Build the loop of a trial.

    Args:
        dataset: Samples of all steps.
        evaluates: Whether to evaluate too, on the first samples.
    """
    context, step = dry_run.context, dry_run.train_step()
    rows = RowHashes(dry_run.plan, owns=context.layout.rank == 0)
    fingerprints = StepFingerprints(context, step.bundle, NO_LOG, rows)
    return Loop(
        context=context,
        step=step,
        readings=Readings(context, step, dry_run.hooks),
        fingerprints=fingerprints,
        recorder=recorder,
        hooks=dry_run.hooks,
        train_batches=dry_run.batches(dataset),
        validation_batches=partial(dry_run.batches, dataset, 0) if evaluates else None,
        num_microbatches=dry_run.plan.num_microbatches,
        last_step=last_step,
        save=lambda: checkpoints.save(fingerprints.latest),
    )
