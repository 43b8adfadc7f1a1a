"""TensorBoard: write the metrics of a run to event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import (
    ANY,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    RunContext,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from .events import EventFiles


@attrs.frozen(kw_only=True)
class TensorBoardConfig:
    """Options, set by ``plugins.tensorboard.<field>=<value>``."""

    folder: str | None = None
    """Folder of the event files; default: ``<run.output_dir>/tensorboard``."""
    flush_seconds: int = attrs.field(default=30, validator=attrs.validators.gt(0))
    """How long a metric may stay buffered before it is written. Unit: seconds."""


class TensorBoard:
    """Write every logged metric, under its own name and step, to TensorBoard event files.

    Cost: on one rank, once per logged step, some microseconds per metric. Numerics: bitwise
    neutral.
    """

    manifest = Manifest(
        name="tensorboard",
        summary="write the metrics of the run to TensorBoard event files",
        numerics=Numerics.BITWISE,
        # The plugin reads host numbers only; each level states what has run on that platform.
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--tensorboard-dir", values={ANY: True}),
            LegacyFlag(flag="--tensorboard-dir", key="plugins.tensorboard.folder", values=None),
        ),
    )
    config_class = TensorBoardConfig

    def __init__(self, config: TensorBoardConfig) -> None:
        self.config = config
        self._files: EventFiles | None = None

    @hookimpl
    def ascend_check(self) -> Sequence[str]:
        if find_spec("tensorboard") is not None:
            return ()
        problem = (
            "tensorboard: the package 'tensorboard' is not installed; "
            "pip install 'ascend-run[tensorboard]', or leave the plugin out"
        )
        return (problem,)

    @hookimpl
    def ascend_after_log(self, context: RunContext, metrics: Mapping[str, Any]) -> None:
        self._write(context, metrics)

    @hookimpl
    def ascend_after_evaluation(
        self, context: RunContext, loss: float, metrics: Mapping[str, float]
    ) -> None:
        more = {f"eval_{name}": value for name, value in metrics.items()}
        self._write(context, {"eval_loss": loss, **more})

    @hookimpl
    def ascend_after_run(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def _write(self, context: RunContext, readings: Mapping[str, object]) -> None:
        if context.layout.rank != 0:
            return
        if self._files is None:
            from .events import EventFiles

            folder = self.config.folder or Path(context.config.run.output_dir) / "tensorboard"
            self._files = EventFiles(
                Path(folder), context.step, flush_seconds=self.config.flush_seconds
            )
        self._files.write(context.step, readings)
