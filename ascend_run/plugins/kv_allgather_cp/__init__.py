"""Context parallelism by gathering: every rank takes in the keys and values of all ranks."""

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

from .cost import gathering_cost

LETS_THROUGH: Final = AttentionFeatures.all_but()
"""Sinks come in after the merge, whatever the inner kernel can do."""


@attrs.frozen(kw_only=True)
class KvAllgatherCpConfig(SharedSequenceOptions):
    """Options, set by ``plugins.kv-allgather-cp.<field>=<value>``."""

    groups_at_once: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Key-value heads of a tensor-parallel rank whose keys and values are gathered at a time: with
    fewer a rank holds less of the sequence, sends more messages, and more of them travel beside the
    computation; default: all of them. Unit: heads."""


class KvAllgatherCp:
    """Every rank holds two parts of the sequence, and gathers the keys and values of all.

    Cost: a layer sends one message in forward and two in backward, with the bytes of a ring; a rank
    holds the keys and values of the whole sequence while it attends. Numerics: sums over keys are
    taken in another order. Source: arXiv:2407.21783, section 3.3.2.
    """

    manifest = Manifest(
        name="kv-allgather-cp",
        summary="split sequences over ranks, gathering all keys and values for the attention",
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition.one_rank("context_parallel_size", why="there is nothing to gather"),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention=LETS_THROUGH,
        attention_needs=AttentionFeatures(unequal_lengths=True),
        level=2,
        legacy_flags=("--context-parallel-algo kvallgather_cp_algo",),
        source="The Llama 3 Herd of Models, arXiv:2407.21783",
    )
    config_class = KvAllgatherCpConfig

    def __init__(self, config: KvAllgatherCpConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        if layout.cp <= 1:
            return []
        return [*kv_cache_problems("kv-allgather-cp", self.config, config.model.num_layers)]

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        return self.config.sharing if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        return gathering_cost(layout, rank, self.config) if layout.cp > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import GatheringKernel

        options = self.config
        kv_cache = options.kv_cache_of(layer_index)
        return lambda inner: GatheringKernel(
            inner,
            groups.cp,
            options.sharing,
            groups_at_once=options.groups_at_once,
            kv_cache=kv_cache,
        )
