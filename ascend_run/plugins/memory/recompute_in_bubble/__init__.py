"""Recompute what a pipeline rank cannot keep in flight, while it waits for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    ActivationTreatment,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Metrics,
    Numerics,
    PipelineStage,
    RecomputedAhead,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import (
    IN_ONE_CHUNK,
    overlapped_sends,
    problems_of_sends,
    random_state,
    recomputed,
)

if TYPE_CHECKING:
    from ascend_run.ops.recompute_ahead.choice import Choice
    from ascend_run.ops.recompute_ahead.engine import RecomputeAhead
    from ascend_run.ops.recompute_ahead.order import ScheduleOrder
    from ascend_run.plugin_api import contracts as c

NAME: Final = "recompute-in-bubble"
_TREATS: Final = "recompute-in-bubble treats the activations of whole layers; enable one of them"


@attrs.frozen(kw_only=True)
class RecomputeInBubbleConfig:
    """Options, set by ``plugins.recompute-in-bubble.<field>=<value>``."""

    num_forwards: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Forwards of a chunk and micro-batch that have their activations on a rank at the same time;
    default: ``pipeline_model_parallel_size`` times ``virtual_pipeline_model_parallel_size``."""


class RecomputeInBubble:
    """Keep the activations of a limited number of forwards on each pipeline rank, and recompute the
    others while the rank waits for gradients.

    The first ranks of an interleaved pipeline start more forwards than the last ones before their
    first backward. Cost: a forward of each chunk and micro-batch above the limit, mostly while the
    rank would be idle. Numerics: bitwise neutral. Source: the behaviour of MindSpeed's
    ``--recompute-in-bubble``, with the most forwards kept.
    """

    manifest = Manifest(
        name=NAME,
        summary="recompute forwards above a limit while a pipeline rank waits for gradients",
        idle=IN_ONE_CHUNK,
        conflicts={
            "adaptive-recompute": _TREATS,
            "recompute": _TREATS,
            "recompute-activation": _TREATS,
            "recompute-norm": _TREATS,
            "swap-attention": _TREATS,
        },
        exercised_by="verify it with a lower plugins.recompute-in-bubble.num_forwards: no rank had "
        "more forwards in flight",
        small_model_settings={"num_forwards": 2},
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.EMULATED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes time: only where memory is short
        legacy_flags=(LegacyFlag(flag="--recompute-in-bubble"),),
        source="MindSpeed, docs/features/recompute_independent_pipelining.md",
    )
    config_class = RecomputeInBubbleConfig

    def __init__(self, config: RecomputeInBubbleConfig) -> None:
        self.config = config
        self._ahead: RecomputeAhead | None = None

    @hookimpl
    def ascend_defaults(self, config: RunConfig) -> Mapping[str, object]:
        return overlapped_sends(config)

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems_of_sends(NAME, config, layout)]

    @hookimpl
    def ascend_activation_policy(
        self, config: RunConfig
    ) -> Mapping[str, ActivationTreatment] | None:
        return None if IN_ONE_CHUNK.holds(config) else {"": recomputed(self._engine)}

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.vpp is None or IN_ONE_CHUNK.holds(config):
            return None
        from ascend_run.ops.recompute_ahead.order import ScheduleOrder

        group = config.parallel.microbatch_group_size_per_vp_stage or layout.pp
        order = ScheduleOrder(layout.pp, rank.pp_rank, layout.vpp, group, rank.num_microbatches)
        kept = self._choose(order).kept
        repeated = [0.0] * layout.vpp
        for number, (chunk, _) in enumerate(order.forwards):
            repeated[chunk] += (number not in kept) / rank.num_microbatches
        return CostChange(
            recomputed_ahead=RecomputedAhead(
                kept_forwards=self._limit(order), repeated=tuple(repeated)
            )
        )

    @hookimpl
    def ascend_schedule(self, config: RunConfig) -> c.Wrapper[Callable[..., Any]] | None:
        return None if IN_ONE_CHUNK.holds(config) else self._engine().schedule

    def _engine(self) -> RecomputeAhead:
        from ascend_run.ops.recompute_ahead.engine import RecomputeAhead

        if self._ahead is None:
            self._ahead = RecomputeAhead(self._choose, random_state)
        return self._ahead

    def _choose(self, order: ScheduleOrder) -> Choice:
        from ascend_run.ops.recompute_ahead.choice import within

        return within(self._limit(order), order)

    def _limit(self, order: ScheduleOrder) -> int:
        return self.config.num_forwards or order.pipeline * order.chunks

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {NAME: self._readings}

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return the layers that the last step recomputed while waiting, and in backward."""
        return self._engine().counts
