"""Hybrid context parallelism: Ulysses among neighbours, a ring over the groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.attention.ring_attention.cut import Nested
from ascend_run.ops.attention.ring_attention.options import SharedSequenceOptions
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

from .cost import hybrid_cost
from .groups import HEADS, WINDOW, WINDOWS, rank_lists
from .rules import problems

LETS_THROUGH: Final = AttentionFeatures.all_but()


@attrs.frozen(kw_only=True)
class HybridCpConfig(SharedSequenceOptions):
    """Options, set by ``plugins.hybrid-cp.<field>=<value>``."""

    ulysses_degree: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Neighbours that exchange heads for sequence: best ranks of one node, since an all-to-all
    waits for its bytes. It divides ``parallel.context_parallel_size`` and the heads of a
    tensor-parallel rank. Unit: ranks."""
    window: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Members of the ring that pass keys among themselves before they take those of another window,
    as in ``double-ring``; default: all of them. Unit: ranks."""


class HybridCp:
    """Inside a group of U neighbours, heads for sequence; around the ring of groups, keys.

    Cost: four all-to-all messages among U ranks and the ring's among P / U, each of U times as
    many positions and as many times fewer heads. Numerics: sums over keys are taken in another
    order. Source: USP, arXiv:2405.07719.
    """

    manifest = Manifest(
        name="hybrid-cp",
        summary="split sequences over ranks: heads exchanged among neighbours, keys round a ring",
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
        legacy_flags=(
            "--context-parallel-algo hybrid_cp_algo",
            "--ulysses-degree-in-cp",
            "--cp-window-size",
            "--context-parallel-kv-cache-policy",
            "--context-parallel-cache-interval",
        ),
        source="USP: a unified sequence parallelism, arXiv:2405.07719",
    )
    config_class = HybridCpConfig

    def __init__(self, config: HybridCpConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*problems(config, layout, self.config)]

    @hookimpl
    def ascend_process_groups(self, layout: Layout) -> Mapping[str, Sequence[Sequence[int]]]:
        return rank_lists(layout, self.config.ulysses_degree, self.config.window)

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        return Nested(self.config.sharing, self.config.ulysses_degree)

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.cp <= 1:
            return None
        return hybrid_cost(layout, rank, self.config)

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import HybridKernel

        kv_cache = self.config.kv_cache_of(layer_index)
        heads, window, windows = (getattr(groups, name) for name in (HEADS, WINDOW, WINDOWS))
        cut = self.config.sharing
        return lambda inner: HybridKernel(inner, heads, window, windows, cut, kv_cache=kv_cache)
