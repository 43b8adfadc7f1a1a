"""A timeline of the memory of some steps, by category."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    Layout,
    Manifest,
    Maturity,
    Numerics,
    ReportPanel,
    RunContext,
    RunPhase,
    StorageError,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from .recording import Recording

FILE_NAME: Final = "memory_timeline.jsonl"
_OF_A_STEP: Final = (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.REDUCTION, RunPhase.UPDATE)
_opened: Final = partial(os.open, mode=0o640)


def _steps(instance: object, attribute: object, steps: tuple[int, ...]) -> None:
    if any(step < 1 for step in steps):
        raise ValueError(f"steps are counted from 1, got {list(steps)}")


@attrs.frozen(kw_only=True)
class MemoryTimelineConfig:
    """Options, set by ``plugins.memory-timeline.<field>=<value>``."""

    steps: tuple[int, ...] = attrs.field(default=(1, 2), validator=_steps)
    """Optimizer steps to record, from 1. The first one allocates the optimizer's states."""
    rank: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """The rank that records."""
    min_bytes: int = attrs.field(default=2**20, validator=attrs.validators.ge(1))
    """Within a phase, a sample is written when a category has changed by as much. Unit: bytes."""


class MemoryTimeline:
    """Record the allocated bytes of some steps by category, and the phases of these steps.

    Cost: in a recorded step, some Python for each operator. Numerics: bitwise neutral.
    """

    manifest = Manifest(
        name="memory-timeline",
        summary="record the memory of some steps by category, and draw it in the report",
        conflicts={"compile": "what a compiled graph allocates is not seen; leave one out"},
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=3,
        maturity=Maturity.EXPERIMENTAL,
    )
    config_class = MemoryTimelineConfig

    def __init__(self, config: MemoryTimelineConfig) -> None:
        self.config = config
        self._recording: Recording | None = None
        self._lines: list[str] = []

    @hookimpl
    def ascend_check(self, layout: Layout) -> Sequence[str]:
        last = layout.world_size - 1
        if self.config.rank <= last:
            return ()
        option = f"plugins.memory-timeline.rank={self.config.rank}"
        return (f"memory-timeline: {option} is no rank of this run; use 0 to {last}",)

    @hookimpl
    def ascend_phase(
        self, context: RunContext, phase: RunPhase
    ) -> Callable[[], AbstractContextManager[Any]] | None:
        records = phase in _OF_A_STEP and context.layout.rank == self.config.rank
        return partial(self._within, phase) if records else None

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return (ReportPanel(title="Memory timeline", metrics=(), unit="bytes", areas=FILE_NAME),)

    @hookimpl
    def ascend_before_step(self, context: RunContext) -> None:
        self._recording, step = None, context.step + 1
        if step in self.config.steps and context.layout.rank == self.config.rank:
            from .recording import Recording

            self._recording = Recording(
                step, [*context.models.values()], context.device.torch_device
            )

    @hookimpl
    def ascend_after_step(self) -> None:
        self._end(failed=False)

    @hookimpl
    def ascend_after_log(self, context: RunContext) -> None:
        self._write(context)

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self._end(failed=True)  # a step that has not ended
        self._write(context)

    @contextmanager
    def _within(self, phase: RunPhase) -> Iterator[None]:
        if self._recording is None:
            yield
        else:
            with self._recording.within(phase):
                yield

    def _end(self, *, failed: bool) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            samples = recording.end(self.config.min_bytes, failed=failed)
            self._lines += [json.dumps(sample) + "\n" for sample in samples]

    def _write(self, context: RunContext) -> None:
        if not self._lines:
            return
        path = Path(context.config.run.output_dir) / FILE_NAME
        lines, self._lines = self._lines, []
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=_opened) as file:
                file.writelines(lines)
        except OSError as error:
            raise StorageError(
                f"memory-timeline: cannot write {path}",
                [f"{error.strerror or error}; make room, or choose another run.output_dir"],
            ) from error
