"""Unaligned Ulysses: heads for sequence where the ranks divide neither of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ascend_run.ops.attention.kv_cache import WholeKvCacheOptions
from ascend_run.plugin_api import (
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

from .cost import exchange_cost
from .partition import UnevenParts
from .rules import LETS_THROUGH, problems


@attrs.frozen(kw_only=True)
class UnalignedUlyssesConfig(WholeKvCacheOptions):
    """Options, set by ``plugins.unaligned-ulysses.<field>=<value>``."""


class UnalignedUlysses:
    """As ``ulysses``; the first ranks have one head, and hold one position, more than the last.

    Cost: four messages a layer and step. Numerics: the attention of a head is what it was; sums
    of gradients over ranks are taken in another order. Source: arXiv:2309.14509.
    """

    manifest = Manifest(
        name="unaligned-ulysses",
        summary="split sequences over ranks that divide neither their length nor the heads",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition(
            "parallel.context_parallel_size",
            "<=",
            1,
            why="there is nothing to exchange",
            fix="set parallel.context_parallel_size",
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention=LETS_THROUGH,
        level=2,
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = UnalignedUlyssesConfig

    def __init__(self, config: UnalignedUlyssesConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems(config, layout, self.config)]

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        return UnevenParts.of(config) if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        return exchange_cost(config, layout, rank, self.config) if layout.cp > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import UnalignedUlyssesKernel

        partition, kv_cache = UnevenParts.of(config), self.config.kv_cache_of(layer_index)
        return lambda inner: UnalignedUlyssesKernel(inner, groups.cp, partition, kv_cache=kv_cache)
