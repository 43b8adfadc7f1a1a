"""Fused MLP: the two linears of an MLP, their adapters and the activation as one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import (
    Condition,
    CostChange,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c

ADAPTERS: Final = "lora"
"""The plugin whose adapters it computes."""
_COLLECTIVES: Final = "it computes the linears of MLPs itself, without the collectives of {}"


@attrs.frozen(kw_only=True)
class FusedMlpOptions:
    """It has no options."""


class FusedMlp:
    """Compute each dense MLP together with the adapters of its linears, as one function that keeps
    only the output of the first linear, besides what adapters read.

    Cost: the activation function, recomputed in backward. One gather of the output's gradient
    serves the weight and the adapter, and the adapters' collectives overlap with matmuls. Numerics:
    the reduction order. Source: the behaviour of MindSpeed-LLM's fused MLP.
    """

    manifest = Manifest(
        name="fused-mlp",
        summary="compute gated MLPs with their adapters as one function that saves less",
        requires=(
            ADAPTERS,
            Condition(
                "model.gated_linear_unit",
                "==",
                True,
                why="it is for gated MLPs",
                fix="set model.gated_linear_unit=true, or leave fused-mlp out",
            ),
        ),
        conflicts={
            "recompute-activation": "it already recomputes the activation in backward",
            **{name: _COLLECTIVES.format(name) for name in ("coc", "mc2", "recompute-comm-opt")},
        },
        forward_links={"mlp": LinkPlace.OWN},
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it acts beside lora only
        legacy_flags=(LegacyFlag(flag="--use-fused-mlp"),),
        source="MindSpeed-LLM, docs/features/fused_mlp.md",
    )
    config_class = FusedMlpOptions

    def __init__(self, config: FusedMlpOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        from .rules import problems

        return problems(config, config.plugins[ADAPTERS])

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        from .cost import cost_change

        return cost_change(config, layout, rank)

    @hookimpl
    def ascend_mlp(self) -> c.ModuleWrapper:
        from .mlp import link

        return link
