"""Recompute or swap as little as a budget of bytes for activations allows, as measured in the first
steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.ops.transfer.file_folder import problems_of_folder
from ascend_run.plugin_api import (
    ActivationTreatment,
    CostChange,
    Device,
    ForwardLink,
    Keeping,
    Layout,
    LegacyFlag,
    Manifest,
    Numerics,
    PipelineStage,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import MIB, no_file

from .cost import cost_of
from .outcome import FILE_NAME, Outcome

if TYPE_CHECKING:
    from .autotuner import Autotuner

_NAME: Final = "adaptive-recompute"
_UNLIMITED: Final = 1 << 62


@attrs.frozen(kw_only=True)
class AdaptiveRecomputeConfig:
    """Options, set by ``plugins.adaptive-recompute.<field>=<value>``."""

    activation_mb: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(0.0))
    )
    """What the layers of a rank may keep for backward, over all micro-batches in flight; must be
    given without ``retry``. Unit: MiB."""
    profiled_steps: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """Steps that are measured, in which nothing is recomputed. Unit: steps."""
    retry: bool = False
    """If memory runs out, lower the budget and try the step again, until the largest budget is
    found that memory has room for, or ``activation_mb``. On one rank only."""
    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors with a smaller storage are not swapped. Unit: bytes."""
    folder: str | None = None
    """Existing folder on a disk, for memory-mapped files in place of host memory, to which parts
    are swapped; copies then are not overlapped. On the CPU nothing is swapped without one."""


class AdaptiveRecompute:
    """Measure what each part of a layer keeps for backward, how long it takes and how long copies
    of it would, and recompute or swap those parts that cost least within a budget.

    Cost: the forward of what is recomputed once more, and the wait for copies of what is swapped.
    Numerics: bitwise neutral. Source: the behaviour of MindSpeed's
    ``--adaptive-recompute-device-swap``; there memory that runs out is what swaps.
    """

    manifest = Manifest(
        name=_NAME,
        summary="recompute or swap the parts of layers that cost least within a budget of bytes",
        conflicts={
            "recompute": "it says what is recomputed, and adaptive-recompute chooses it; enable "
            "one of them",
            "recompute-activation": "adaptive-recompute chooses what is recomputed; leave out "
            "recompute-activation",
            "recompute-norm": "adaptive-recompute chooses which norms are recomputed; leave out "
            "recompute-norm",
            "swap-attention": "it says what is swapped, and adaptive-recompute chooses it; enable "
            "one of them",
            "moe-adaptive-recompute": "what a layer keeps then depends on its tokens, and the "
            "choice holds for all later steps; use moe-zero-memory",
        },
        exercised_by="verify it with a lower plugins.adaptive-recompute.activation_mb: what the "
        "layers keep was within the budget",
        small_model_settings={"activation_mb": 0.03, "profiled_steps": 1, "min_bytes": 1},
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes time: only where memory is short
        legacy_flags=(
            LegacyFlag(flag="--adaptive-recompute-device-swap"),
            LegacyFlag(
                flag="--adaptive-recompute-device-size",
                key="plugins.adaptive-recompute.activation_mb",
                values=None,
            ),
            LegacyFlag(
                flag="--adaptive-recompute-profiling-step",
                key="plugins.adaptive-recompute.profiled_steps",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/adaptive-recompute.md",
    )
    config_class = AdaptiveRecomputeConfig

    def __init__(self, config: AdaptiveRecomputeConfig) -> None:
        self.config = config
        self._tuner: Autotuner | None = None
        self._written: Outcome | None = None

    @property
    def _budget(self) -> int | None:
        given = self.config.activation_mb
        return None if given is None else int(given * MIB)

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        retry = "plugins.adaptive-recompute.retry=true"
        problems = []
        if self.config.activation_mb is None and not self.config.retry:
            problems.append(
                "plugins.adaptive-recompute.activation_mb is not set; give the MiB that the layers "
                f"of a rank may keep for backward, such as 20000, or, on one rank, set {retry}"
            )
        if self.config.retry and layout.world_size > 1:
            problems.append(
                f"{retry} is for one rank: of {layout.world_size}, the others would wait for one "
                "whose memory has run out; set plugins.adaptive-recompute.activation_mb instead"
            )
        elif self.config.retry and config.ddp.overlap_grad_reduce:
            problems.append(
                f"{retry} cannot start the reductions of ddp.overlap_grad_reduce again, and on one "
                "rank there is nothing to reduce; leave it out"
            )
        folder = problems_of_folder(_NAME, self.config.folder, config.platform)
        return [*(f"{_NAME}: {problem}" for problem in problems), *folder]

    @hookimpl
    def ascend_activation_policy(self, place: int, chunk: int) -> Mapping[str, ActivationTreatment]:
        return {"": ActivationTreatment(Keeping.RECOMPUTE, partial(self._links, (chunk, place)))}

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        budget, folder = self._budget, self.config.folder
        swaps = folder is not None or config.platform != "cpu"
        return cost_of(
            _UNLIMITED if budget is None else budget,
            self.config.min_bytes if swaps else None,
            config,
            layout,
            rank,
            to_host=folder is None,
        )

    def _links(
        self, place: tuple[int, int], layer: Any, parts: Sequence[str], device: Device
    ) -> Mapping[str, ForwardLink]:
        if self._tuner is None:
            self._tuner = self._make_tuner(device)
        return self._tuner.links(layer, place)

    def _make_tuner(self, device: Device) -> Autotuner:
        from ascend_run.ops.swapping.swapper import Swapper
        from ascend_run.ops.transfer.file_copier import FileCopier

        from .autotuner import Autotuner

        options, swapper = self.config, None
        folder = options.folder
        if folder is not None or device.torch_device.type != "cpu":  # it frees memory
            no_room = partial(no_file, _NAME, folder or "")
            copier = device.host_copier() if folder is None else FileCopier(folder, no_room)
            min_bytes = options.min_bytes
            swapper = Swapper(device.torch_device, copier, min_bytes=min_bytes, prefetch=1)
        return Autotuner(
            device,
            budget=self._budget,
            profiled_steps=options.profiled_steps,
            swapper=swapper,
            is_overlapped=options.folder is None,
        )

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return (
            ReportPanel(
                title="What is recomputed or swapped, and why", metrics=(), table=FILE_NAME
            ),
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        if self.config.retry and context.config.platform == "cpu":
            event = "plugin.idle" if self.config.activation_mb is None else f"{_NAME}.never_retries"
            why = "the CPU raises no torch.OutOfMemoryError, which retry=true waits for"
            import structlog

            structlog.get_logger().warning(event, plugin=_NAME, changes_nothing_as=why)

    @hookimpl
    def ascend_before_step(self, context: RunContext) -> None:
        if self._tuner is not None:
            self._tuner.begin_step(context)

    @hookimpl
    def ascend_out_of_memory(self, context: RunContext) -> Callable[[], bool] | None:
        return partial(self._lower_budget, context) if self.config.retry else None

    def _lower_budget(self, context: RunContext) -> bool:
        return self._tuner is not None and self._tuner.lower_budget(context)

    @hookimpl
    def ascend_after_log(self, context: RunContext) -> None:
        self._write(context)

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self._write(context)

    def _write(self, context: RunContext) -> None:
        outcome = None if self._tuner is None else self._tuner.outcome
        before, self._written = self._written, outcome
        if outcome is not None and outcome is not before and context.layout.rank == 0:
            outcome.write(context.config.run.output_dir)
