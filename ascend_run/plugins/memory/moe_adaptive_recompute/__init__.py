"""Recompute the experts of a layer in backward if one of them has many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.experts.dispatcher_cost import NO_EXPERTS
from ascend_run.ops.experts.recompute_cost import recompute_cost
from ascend_run.plugin_api import (
    CostChange,
    Device,
    ForwardLink,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Metrics,
    ModuleWrapper,
    Numerics,
    PipelineStage,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import random_state

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch import nn

    from .threshold import Threshold

_LINKED: Final = ("moe_layer", "router", "experts", "shared_experts")


@attrs.frozen(kw_only=True)
class MoeAdaptiveRecomputeConfig:
    """Options, set by ``plugins.moe-adaptive-recompute.<field>=<value>``."""

    scale: float = attrs.field(default=2.0, validator=attrs.validators.ge(0.0))
    """The experts of a layer are recomputed if the fullest of them has more than this many times
    the mean number of tokens of all experts."""
    keep_tokens: bool = True
    """Keep the tokens that the experts are recomputed from. Each rank then decides by its own
    experts. Otherwise the tokens are dispatched again, and all ranks that exchange tokens recompute
    if one of them exceeds the threshold."""


class MoeAdaptiveRecompute:
    """Bound the memory of a skewed routing: what the experts of a crowded layer save is recomputed.

    Cost: the forward of the experts of such layers, once more. Numerics: bitwise neutral. Source:
    the behaviour of MindSpeed's ``--moe-adaptive-recompute-activation``, with the counts of the
    forward itself instead of those of the layer's forward before.
    """

    manifest = Manifest(
        name="moe-adaptive-recompute",
        summary="recompute the experts of layers whose fullest expert exceeds a threshold",
        idle=NO_EXPERTS,
        conflicts={
            "moe-zero-memory": "it recomputes the experts of every layer already; enable one"
        },
        exercised_by="verify it with a lower plugins.moe-adaptive-recompute.scale: no expert had "
        "more tokens than its threshold",
        small_model_settings={"scale": 0.5},
        forward_links=dict.fromkeys(_LINKED, LinkPlace.AROUND),
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=2,
        legacy_flags=(
            LegacyFlag(flag="--moe-adaptive-recompute-activation"),
            LegacyFlag(
                flag="--moe-adaptive-recompute-activation-scale",
                key="plugins.moe-adaptive-recompute.scale",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/moe-adaptive-recompute",
    )
    config_class = MoeAdaptiveRecomputeConfig

    def __init__(self, config: MoeAdaptiveRecomputeConfig) -> None:
        self.config = config
        self._thresholds: list[Threshold] = []

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(self._problems(config))

    def _problems(self, config: RunConfig) -> Iterator[str]:
        model = config.model
        if not model.num_moe_experts:
            return
        if model.recompute_granularity == "full":
            yield (
                "moe-adaptive-recompute: model.recompute_granularity=full recomputes the experts "
                "of every layer already; use selective recomputation, or leave "
                "moe-adaptive-recompute out"
            )
        twice = {"moe", "moe_act"} & {*(model.recompute_modules or ())}
        if model.recompute_granularity == "selective" and twice:
            yield (
                "moe-adaptive-recompute: model.recompute_modules names "
                f"{' and '.join(sorted(twice))}, which recomputes the experts of every layer; "
                "leave out one"
            )

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the cost of a balanced routing, in which each expert has the mean of tokens."""
        layers = sorted(rank.moe_layers)
        if not layers or self.config.scale >= 1.0:
            return None
        keeping = layers if self.config.keep_tokens else ()
        return recompute_cost(config, layout, rank, layers=layers, keeping=keeping, shared=False)

    @hookimpl
    def ascend_moe_layer(
        self, config: RunConfig, device: Device, groups: ProcessGroupCollection
    ) -> ModuleWrapper:
        from ascend_run.ops.experts.moe_recompute import MoeRecompute

        from .threshold import Threshold

        model = config.model
        threshold = Threshold(
            scale=self.config.scale,
            mean_by_token=model.moe_router_topk * groups.tp_ep.size() / model.num_moe_experts,
            group=None if self.config.keep_tokens else groups.tp_ep,
            device=device.torch_device,
        )
        self._thresholds.append(threshold)

        def wrap(module: nn.Module) -> dict[str, ForwardLink]:
            return MoeRecompute(module, threshold.choose, random_state, shared=False).links()

        return wrap

    @hookimpl
    def ascend_before_step(self) -> None:
        for threshold in self._thresholds:
            threshold.exceeded = 0

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"moe-adaptive-recompute": self._readings}

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return [
            ReportPanel(
                title="Layers whose experts are recomputed",
                metrics=("moe-adaptive-recompute/recomputed",),
                unit="layer forwards",
            )
        ]

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return how many forwards of layers this rank recomputed in the last step."""
        return {"recomputed": float(sum(threshold.exceeded for threshold in self._thresholds))}
