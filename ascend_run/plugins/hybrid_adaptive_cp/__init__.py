"""Hybrid adaptive context parallelism: heads among neighbours, keys by the mask between groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.attention.adaptive.options import AdaptiveOptions
from ascend_run.ops.attention.ring_attention.cut import Nested
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

from .cost import hybrid_adaptive_cost
from .groups import HEADS, KEYS, rank_lists
from .rules import problems

LETS_THROUGH: Final = AttentionFeatures.all_but()


@attrs.frozen(kw_only=True)
class HybridAdaptiveCpConfig(AdaptiveOptions):
    """Options, set by ``plugins.hybrid-adaptive-cp.<field>=<value>``."""

    ulysses_degree: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Neighbours that exchange heads for sequence: best ranks of one node, since an all-to-all
    waits for its bytes. It divides ``parallel.context_parallel_size`` and the heads of a
    tensor-parallel rank. Unit: ranks."""


class HybridAdaptiveCp:
    """Inside a group of U neighbours, heads for sequence; between the groups, keys by the mask.

    Cost: four all-to-all messages among U ranks, and those of ``adaptive-cp`` among P / U, each of
    U times as many positions and as many times fewer heads. Numerics: sums over keys are taken in
    another order. Source: the hybrid adaptive context parallelism of MindSpeed.
    """

    manifest = Manifest(
        name="hybrid-adaptive-cp",
        summary="split sequences over ranks: heads exchanged among neighbours, keys by the mask",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition.one_rank("context_parallel_size", why="there is nothing to exchange"),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention=LETS_THROUGH,
        attention_needs=AttentionFeatures(unequal_lengths=True),
        level=2,
        legacy_flags=("--context-parallel-algo hybrid_adaptive_cp_algo",),
        source="the hybrid adaptive context parallelism of MindSpeed",
    )
    config_class = HybridAdaptiveCpConfig

    def __init__(self, config: HybridAdaptiveCpConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems(config, layout, self.config.ulysses_degree)]

    @hookimpl
    def ascend_process_groups(self, layout: Layout) -> Mapping[str, Sequence[Sequence[int]]]:
        return rank_lists(layout, self.config.ulysses_degree)

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        outer = self.config.sharing(config.model.get("window_size"))
        return Nested(outer, self.config.ulysses_degree)

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        return hybrid_adaptive_cost(config, layout, rank, self.config) if layout.cp > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import HybridAdaptiveKernel

        heads, keys = (getattr(groups, name) for name in (HEADS, KEYS))
        cut = self.config.sharing(config.model.get("window_size"))
        return lambda inner: HybridAdaptiveKernel(inner, heads, keys, cut)
