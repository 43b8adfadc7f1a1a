"""Ring attention: split a sequence over ranks, and pass keys and values round them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.attention.kv_cache import kv_cache_problems
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

from .cost import ring_cost

LETS_THROUGH: Final = AttentionFeatures.all_but()
"""Sinks come in after the merge, whatever the inner kernel can do."""


@attrs.frozen(kw_only=True)
class RingAttentionConfig(SharedSequenceOptions):
    """Options, set by ``plugins.ring-attention.<field>=<value>``."""


class RingAttention:
    """Every rank holds two parts of the sequence; keys and values of the others come by.

    Cost: P - 1 messages a layer in forward and two times as many in backward, beside the
    computation. Numerics: sums over keys are taken in another order. Source: arXiv:2310.01889.
    """

    manifest = Manifest(
        name="ring-attention",
        summary="split sequences over ranks, passing keys and values round during the attention",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition.one_rank("context_parallel_size", why="there is nobody to pass anything to"),
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
            "--context-parallel-algo megatron_cp_algo",
            "--use-cp-send-recv-overlap",
            "--attention-mask-type",
            "--cp-attention-mask-type",
            "--context-parallel-kv-cache-policy",
            "--context-parallel-cache-interval",
        ),
        source="Ring Attention with Blockwise Transformers, arXiv:2310.01889",
    )
    config_class = RingAttentionConfig

    def __init__(self, config: RingAttentionConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        if layout.cp <= 1:
            return []
        return [*kv_cache_problems("ring-attention", self.config, config.model.num_layers)]

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        return self.config.sharing

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.cp <= 1:
            return None
        return ring_cost(layout, rank, self.config)

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import RingKernel

        kv_cache = self.config.kv_cache_of(layer_index)
        cut = self.config.sharing
        return lambda inner: RingKernel(inner, groups.cp, cut, kv_cache=kv_cache)
