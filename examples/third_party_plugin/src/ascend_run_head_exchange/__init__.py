"""Sequences split over ranks; heads for sequence around the attention, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Condition,
    Layout,
    Manifest,
    Numerics,
    RunConfig,
    SequencePartition,
    Support,
    Wrapper,
    divisors,
    hookimpl,
    one_of,
)


@attrs.frozen
class EqualParts:
    """Rank r of P holds the r-th P-th part of a sequence: contracts.SequencePartition."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        part = seq_length // size
        return [(part * rank, part * rank + part)]


class HeadExchange:
    """Every rank holds a part of the sequence; for the attention, all of it and part of the heads.

    Numerics: the attention of a head is what it was; sums of gradients over ranks are taken in
    another order. Source: arXiv:2309.14509.
    """

    manifest = Manifest(
        name="head-exchange",
        summary="split sequences over ranks, exchanging each tensor's heads by itself",
        idle=Condition("parallel.context_parallel_size", "<=", 1),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        level=2,
        attention=AttentionFeatures.all_but("bias", "position_bias"),
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
        requires_api=">=0,<1",
    )

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        heads = config.model.num_attention_heads
        if heads % layout.tp or heads // layout.tp % layout.cp == 0:
            return []  # or ascend-run itself says so
        problem = (
            f"head-exchange: {heads} heads (model.num_attention_heads) cannot be shared by "
            f"tp={layout.tp} x cp={layout.cp} ranks; use a parallel.context_parallel_size of "
            f"{one_of(divisors(heads // layout.tp))}"
        )
        return [problem]

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> SequencePartition | None:
        return EqualParts() if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_attention(self, config: RunConfig, groups: Any) -> Wrapper[AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import HeadExchangeKernel

        return lambda inner: HeadExchangeKernel(inner, groups.cp)
