"""Recompute as little as a budget of bytes for activations allows, as measured in the first
steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

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
    SavedTensor,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import MIB, in_flight

from .outcome import FILE_NAME, Outcome, log

if TYPE_CHECKING:
    from .decision import Decision
    from .recorder import Mode, Recorder
    from .search import Search

_NAME: Final = "adaptive-recompute"
_UNLIMITED = 1 << 62


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


class AdaptiveRecompute:
    """Measure what each part of a layer keeps for backward and how long it takes, and recompute
    those parts that cost least within a budget.

    Cost: the forward of what is chosen, once more. Numerics: bitwise neutral. Source: the behaviour
    of MindSpeed's ``--adaptive-recompute-device-swap``, without its swapping.
    """

    manifest = Manifest(
        name=_NAME,
        summary="recompute the parts of layers that cost least within a budget of bytes",
        conflicts={
            "recompute": "it says what is recomputed, and adaptive-recompute chooses it; enable "
            "one of them",
            "recompute-activation": "adaptive-recompute chooses what is recomputed; leave out "
            "recompute-activation",
            "recompute-norm": "adaptive-recompute chooses which norms are recomputed; leave out "
            "recompute-norm",
            "swap-attention": "what is offloaded is not in the budget, and is kept by hooks that "
            "hide it; enable one of them",
            "moe-adaptive-recompute": "what a layer keeps then depends on its tokens, and the "
            "choice holds for all later steps; use moe-zero-memory",
        },
        exercised_by="verify it with a lower plugins.adaptive-recompute.activation_mb: what the "
        "layers keep was within the budget",
        small_model_settings={"activation_mb": 0.03, "profiled_steps": 1},
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
        given = config.activation_mb
        self._budget = self._most = _UNLIMITED if given is None else int(given * MIB)
        self._steps = 0
        self._search: Search | None = None
        self._tries_again = False
        self._recorder: Recorder | None = None
        self._decision: Decision | None = None
        self._outcome: Outcome | None = None
        self._written: Outcome | None = None
        self._kept = 0

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
        return [f"{_NAME}: {problem}" for problem in problems]

    @hookimpl
    def ascend_activation_policy(self) -> Mapping[str, ActivationTreatment]:
        return {"": ActivationTreatment(Keeping.RECOMPUTE, self._links)}

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return what the budget allows beyond the inputs of the layers."""
        layers = [layer for layer in rank.layers if layer in rank.saved]
        if not layers:
            return None
        inputs = sum(rank.saved[layer][0].nbytes for layer in layers)
        everything = sum(tensor.nbytes for layer in layers for tensor in rank.saved[layer])
        most = self._budget / in_flight(config, layout, rank)
        more = max(0.0, min(everything, most) - inputs) / len(layers)
        kept = SavedTensor(part="layer", name="within_budget", nbytes=more)
        return CostChange(saved_added=(kept,))

    def _links(self, layer: Any, parts: Sequence[str], device: Device) -> dict[str, ForwardLink]:
        from .links import links_of
        from .recorder import Recorder

        if self._recorder is None:
            self._recorder = Recorder(device)
        return links_of(layer, self._recorder)

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return (ReportPanel(title="What is recomputed, and why", metrics=(), table=FILE_NAME),)

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        if self.config.retry and context.config.platform == "cpu":
            event = "plugin.idle" if self.config.activation_mb is None else f"{_NAME}.never_retries"
            why = "the CPU raises no torch.OutOfMemoryError, which retry=true waits for"
            import structlog

            structlog.get_logger().warning(event, plugin=_NAME, changes_nothing_as=why)

    @hookimpl
    def ascend_before_step(self, context: RunContext) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        from .recorder import Mode

        self._kept = recorder.peak or self._kept
        if self._tries_again:
            self._tries_again, mode = False, Mode.LAYERS
        elif self._search is not None:
            mode = self._searched(self._search, recorder, context)
        else:
            mode = self._measured(recorder, context)
        recorder.begin(mode)

    @hookimpl
    def ascend_out_of_memory(self, context: RunContext) -> Callable[[], bool] | None:
        return partial(self._lower_budget, context) if self.config.retry else None

    @hookimpl
    def ascend_after_log(self, context: RunContext) -> None:
        self._write(context)

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self._write(context)

    def _lower_budget(self, context: RunContext) -> bool:
        """Return False if the layers keep as little as they can, or no layer has been measured."""
        recorder, decision = self._recorder, self._decision
        if recorder is None:
            return False
        if decision is not None and decision.expected <= decision.least:
            return False
        from .search import Search

        recorder.assume()
        kept = recorder.peak if decision is None else decision.expected
        if self._search is None:
            found = decision or self._choice(recorder, context)
            if found is None:
                return False
            self._search = Search(found.least, max(kept, found.least), most=self._most)
        self._budget = self._search.failed(kept)
        log(
            "out_of_memory",
            warns=True,
            step=context.step + 1,
            kept_bytes=kept,
            budget_bytes=self._budget,
        )
        self._decide(recorder, context)
        self._tries_again = True
        return True

    def _measured(self, recorder: Recorder, context: RunContext) -> Mode:
        """Decide once enough steps are measured; return what the next step measures."""
        from .recorder import Mode

        done, self._steps = self._steps, self._steps + 1
        if done == self.config.profiled_steps:
            self._decide(recorder, context)
        if done == self.config.profiled_steps + 1:
            self._take_measured()
        after = done - self.config.profiled_steps
        return Mode.PARTS if after < 0 else Mode.LAYERS if after == 0 else Mode.NOTHING

    def _searched(self, search: Search, recorder: Recorder, context: RunContext) -> Mode:
        """Raise the budget if there may be room; return what the next step measures."""
        from .recorder import Mode

        if search.is_settled:
            return Mode.NOTHING
        budget = search.ran()
        if budget is None:
            self._take_measured()
            return Mode.NOTHING
        self._budget = budget
        self._decide(recorder, context)
        return Mode.LAYERS

    def _choice(self, recorder: Recorder, context: RunContext) -> Decision | None:
        from .decision import decide

        device = context.device.torch_device
        return decide(recorder.layers, recorder.moments, context.groups, device, self._budget)

    def _decide(self, recorder: Recorder, context: RunContext) -> None:
        found = self._choice(recorder, context)
        if found is None:
            return
        self._decision = found
        found.apply()
        last = self._outcome
        self._outcome = Outcome(
            step=context.step + 1,
            decision=found,
            budget=None if self._budget == _UNLIMITED else self._budget,
            before=(recorder.peak or self._kept) if last is None else last.before,
        )
        self._outcome.log_choice()

    def _take_measured(self) -> None:
        if self._outcome is not None:
            self._outcome = self._outcome.measured(self._kept)

    def _write(self, context: RunContext) -> None:
        outcome, before = self._outcome, self._written
        self._written = outcome
        if outcome is not None and outcome is not before and context.layout.rank == 0:
            outcome.write(context.config.run.output_dir)
