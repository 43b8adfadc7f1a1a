"""Double ring attention: rings inside windows of fast links, and one ring from window to window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    divisors,
    hookimpl,
    one_of,
)

from .cost import double_ring_cost
from .groups import WINDOW, WINDOWS, rank_lists

LETS_THROUGH: Final = AttentionFeatures.all_but()
"""Sinks come in after the merge, whatever the inner kernel can do."""


@attrs.frozen(kw_only=True)
class DoubleRingConfig(SharedSequenceOptions):
    """Options, set by ``plugins.double-ring.<field>=<value>``."""

    window: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Neighbours that pass keys and values among themselves before they take those of another
    window: best the ranks that one node has of the sequence. It divides
    ``parallel.context_parallel_size``. Unit: ranks."""


class DoubleRing:
    """Keys and values go round each window while those of the next window are already coming.

    Cost: the messages of a ring, but only one in W of them crosses windows, and that one has the
    time of W steps. Numerics: sums over keys are taken in another order.
    Source: LoongTrain, arXiv:2406.18485, section 4.3.
    """

    manifest = Manifest(
        name="double-ring",
        summary="split sequences over ranks as rings of neighbours, and one ring of those rings",
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
            "--cp-window-size",
            "--context-parallel-kv-cache-policy",
            "--context-parallel-cache-interval",
        ),
        source="LoongTrain, arXiv:2406.18485",
    )
    config_class = DoubleRingConfig

    def __init__(self, config: DoubleRingConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        if layout.cp <= 1:
            return []
        problems = [*kv_cache_problems("double-ring", self.config, config.model.num_layers)]
        if layout.cp % self.config.window:
            problems.append(
                f"double-ring: plugins.double-ring.window={self.config.window} does not divide "
                f"parallel.context_parallel_size={layout.cp}; use a window of "
                f"{one_of(divisors(layout.cp))}"
            )
        return problems

    @hookimpl
    def ascend_process_groups(self, layout: Layout) -> Mapping[str, Sequence[Sequence[int]]]:
        return rank_lists(layout, self.config.window)

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        return self.config.sharing

    @hookimpl
    def ascend_cost(self, layout: Layout, rank: RankKind) -> CostChange | None:
        if layout.cp <= 1:
            return None
        return double_ring_cost(layout, rank, self.config)

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any, layer_index: int
    ) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import DoubleRingKernel

        kv_cache = self.config.kv_cache_of(layer_index)
        window, windows = getattr(groups, WINDOW), getattr(groups, WINDOWS)
        cut = self.config.sharing
        return lambda inner: DoubleRingKernel(inner, window, windows, cut, kv_cache=kv_cache)
