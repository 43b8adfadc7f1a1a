"""Recompute the layers of a chunk while its gradient is still on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    CostChange,
    ForwardLink,
    Layout,
    LegacyFlag,
    Manifest,
    Metrics,
    Numerics,
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
    recomputation_of,
)

if TYPE_CHECKING:
    from ascend_run.ops.recompute_ahead.engine import RecomputeAhead
    from ascend_run.plugin_api import contracts as c

NAME: Final = "recompute-in-advance"


@attrs.frozen(kw_only=True)
class RecomputeInAdvanceConfig:
    """Options, set by ``plugins.recompute-in-advance.<field>=<value>``."""

    num_layers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Recomputed layers of a chunk that are recomputed in advance: the last ones, whose backward
    comes first; default: all. With 1, memory does not grow. Unit: layers."""


class RecomputeInAdvance:
    """Recompute the layers of a chunk before the gradient of its output has arrived from the next
    pipeline rank.

    Cost: no work; the activations of a chunk's recomputed layers at once, for one micro-batch.
    Numerics: bitwise neutral. Source: the behaviour of MindSpeed's ``--recompute-in-advance``.
    """

    manifest = Manifest(
        name=NAME,
        summary="recompute the layers of a chunk while its gradient is on the way",
        idle=IN_ONE_CHUNK,
        conflicts={
            "adaptive-recompute": "it chooses after the first steps what is recomputed; use "
            "recompute",
            "recompute-in-bubble": "it recomputes other forwards at the same waits; enable one",
        },
        exercised_by="enable recompute beside it: it acts on layers that are recomputed",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.EMULATED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it acts beside recompute only
        legacy_flags=(LegacyFlag(flag="--recompute-in-advance"),),
        source="MindSpeed, docs/features/recompute_independent_pipelining.md",
    )
    config_class = RecomputeInAdvanceConfig

    def __init__(self, config: RecomputeInAdvanceConfig) -> None:
        self.config = config
        self._ahead: RecomputeAhead | None = None

    @hookimpl
    def ascend_defaults(self, config: RunConfig) -> Mapping[str, object]:
        return overlapped_sends(config)

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems_of_sends(NAME, config, layout), *_problems(config)]

    @hookimpl
    def ascend_cost(self, config: RunConfig) -> CostChange | None:
        if IN_ONE_CHUNK.holds(config):
            return None
        return CostChange(recomputed_ahead=RecomputedAhead(num_layers=self.config.num_layers))

    @hookimpl
    def ascend_layer(self, config: RunConfig) -> c.ModuleWrapper | None:
        if IN_ONE_CHUNK.holds(config):
            return None

        def wrap(layer: Any) -> Mapping[str, ForwardLink]:
            if how := recomputation_of(layer):
                how.ahead = self._engine()
            return {}

        return wrap

    @hookimpl
    def ascend_schedule(self, config: RunConfig) -> c.Wrapper[Callable[..., Any]] | None:
        return None if IN_ONE_CHUNK.holds(config) else self._engine().schedule

    def _engine(self) -> RecomputeAhead:
        from ascend_run.ops.recompute_ahead.choice import each_before_its_backward
        from ascend_run.ops.recompute_ahead.engine import RecomputeAhead

        if self._ahead is None:
            self._ahead = RecomputeAhead(
                each_before_its_backward, random_state, self.config.num_layers
            )
        return self._ahead

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        chunks = (chunk for bundle in context.models.values() for chunk in bundle.chunks)
        acts = any(_is_ahead(module) for chunk in chunks for module in chunk.modules())
        if acts or IN_ONE_CHUNK.holds(context.config):
            return
        import structlog

        why = "this rank recomputes no whole layer; enable recompute"
        structlog.get_logger().warning("plugin.idle", plugin=NAME, changes_nothing_as=why)

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {NAME: self._readings}

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return the layers that were recomputed in advance in the last step, and in backward."""
        return self._engine().counts


def _is_ahead(module: Any) -> bool:
    how = recomputation_of(module)
    return how is not None and how.ahead is not None


def _problems(config: RunConfig) -> Iterator[str]:
    if config.model.recompute_granularity is not None and not IN_ONE_CHUNK.holds(config):
        yield (
            f"{NAME}: what Megatron recomputes itself (model.recompute_granularity="
            f"{config.model.recompute_granularity}; plugins.recompute.method=uniform) is "
            f"recomputed in backward only; use recompute with whole layers one by one, or leave "
            f"{NAME} out"
        )
