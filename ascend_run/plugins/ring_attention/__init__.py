"""Ring attention: split a sequence over ranks, and pass keys and values round them."""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs

from ascend_run.ops.ring_attention.cut import CUTS
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
class RingAttentionConfig:
    """Options, set by ``plugins.ring-attention.<field>=<value>``."""

    cut: Literal["zig-zag", "contiguous"] = "zig-zag"
    """How the ranks share a sequence: an early and a late part each, of every document where
    documents are known, which gives them equal work under a causal mask; or one part each."""
    keep: Literal["nothing", "keys", "all"] = "nothing"
    """What a rank keeps for backward of the keys and values that it received; what it keeps does
    not travel again."""
    keep_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Keep in one layer of this many. Unit: layers."""


class RingAttention:
    """Every rank holds two parts of the sequence; keys and values of the others come by.

    Cost: P - 1 messages a layer in forward and two times as many in backward, beside the
    computation. Numerics: sums over keys are taken in another order. Source: arXiv:2310.01889.
    """

    manifest = Manifest(
        name="ring-attention",
        summary="split sequences over ranks, passing keys and values round during the attention",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition(
            "parallel.context_parallel_size",
            "<=",
            1,
            why="there is nobody to pass anything to",
            fix="set parallel.context_parallel_size",
        ),
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
            "--context-parallel-kv-cache-policy",
            "--context-parallel-cache-interval",
        ),
        source="Ring Attention with Blockwise Transformers, arXiv:2310.01889",
    )
    config_class = RingAttentionConfig

    def __init__(self, config: RingAttentionConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        return CUTS[self.config.cut]

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.cp <= 1:
            return None
        return ring_cost(layout, rank, self.config.keep, self.config.keep_every)

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import RingKernel

        keep = "nothing" if layer_index % self.config.keep_every else self.config.keep
        cut = CUTS[self.config.cut]
        return lambda inner: RingKernel(inner, groups.cp, cut, keep=keep)
