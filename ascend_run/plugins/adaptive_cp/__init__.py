"""Adaptive context parallelism: the mask decides who holds what, and which keys travel."""

from __future__ import annotations

from typing import Any, Final

import attrs

from ascend_run.ops.attention.adaptive.options import AdaptiveOptions
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Claim,
    Condition,
    CostChange,
    Layout,
    Manifest,
    Numerics,
    RankKind,
    RunConfig,
    SequencePartition,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import adaptive_cost

LETS_THROUGH: Final = AttentionFeatures.all_but()
"""Sinks come in after the merge, whatever the inner kernel can do."""


@attrs.frozen(kw_only=True)
class AdaptiveCpConfig(AdaptiveOptions):
    """Options, set by ``plugins.adaptive-cp.<field>=<value>``."""


class AdaptiveCp:
    """Every rank holds chunks that give it equal work, and is sent the keys that they see.

    Cost: at most P - 1 messages a layer in forward and twice as many in backward, beside the
    computation; of the keys and values that the mask hides none is sent. Numerics: sums over keys
    are taken in another order. Source: the adaptive context parallelism of MindSpeed.
    """

    manifest = Manifest(
        name="adaptive-cp",
        summary="split sequences over ranks by what the attention mask shows, sending only that",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition.one_rank("context_parallel_size", why="there is nobody to share with"),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention=LETS_THROUGH,
        attention_needs=AttentionFeatures(unequal_lengths=True),
        level=2,
        legacy_flags=(
            "--context-parallel-algo adaptive_cp_algo",
            "--adaptive-cp-only-reschedule",
            "--adaptive-cp-dynamic-attn-mask",
        ),
        source="the adaptive context parallelism of MindSpeed",
    )
    config_class = AdaptiveCpConfig

    def __init__(self, config: AdaptiveCpConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        return self.config.sharing(config.model.get("window_size"))

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        return adaptive_cost(config, layout, rank, self.config) if layout.cp > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import AdaptiveKernel

        cut = self.config.sharing(config.model.get("window_size"))
        return lambda inner: AdaptiveKernel(inner, groups.cp, cut)
