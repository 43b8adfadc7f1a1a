"""Ulysses: split a sequence over ranks, and exchange it for heads around the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
from .partition import ContiguousPartition
from .rules import LETS_THROUGH, problems


@attrs.frozen(kw_only=True)
class UlyssesConfig(WholeKvCacheOptions):
    """Options, set by ``plugins.ulysses.<field>=<value>``."""

    kv: Literal["exchange", "all-gather"] = "exchange"
    """How keys and values travel: exchanged with the queries, or gathered by all ranks, where there
    is one key-value head on each tensor-parallel rank."""


class Ulysses:
    """Every rank holds a part of the sequence; for the attention, all of it and part of the heads.

    Cost: four messages a layer and step. Numerics: the attention of a head is what it was; sums
    of gradients over ranks are taken in another order. Source: arXiv:2309.14509.
    """

    manifest = Manifest(
        name="ulysses",
        summary="split sequences over ranks, exchanging heads for sequence around the attention",
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
        legacy_flags=(
            "--context-parallel-algo ulysses_cp_algo",
            "--use-ulysses-allgather-kv",
            "--context-parallel-kv-cache-policy",
            "--context-parallel-cache-interval",
        ),
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = UlyssesConfig

    def __init__(self, config: UlyssesConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems(config, layout, self.config)]

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        return ContiguousPartition() if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        return exchange_cost(layout, rank, self.config) if layout.cp > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import UlyssesKernel

        kv_cache, gathers = self.config.kv_cache_of(layer_index), self.config.kv == "all-gather"
        return lambda inner: UlyssesKernel(inner, groups.cp, kv_cache=kv_cache, gathers=gathers)
