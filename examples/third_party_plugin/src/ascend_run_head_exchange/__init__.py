"""Sequences split over ranks; heads for sequence around the attention, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import Claim, Condition, Manifest, Numerics, Support, hookimpl

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, RunConfig
    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class HeadExchangeConfig:
    """It has no options: ``parallel.context_parallel_size`` is the number of ranks."""


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
        claims=(Claim.SEQUENCE_EXCHANGE,),
        idle=Condition("parallel.context_parallel_size", "<=", 1),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = HeadExchangeConfig

    def __init__(self, config: HeadExchangeConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        heads, length = config.model.num_attention_heads, config.data.seq_length
        problems = []
        if heads % (layout.tp * layout.cp):
            problems.append(
                f"head-exchange: {heads} heads (model.num_attention_heads) cannot be shared by "
                f"tp={layout.tp} x cp={layout.cp} ranks; use sizes whose product divides {heads}"
            )
        if length % layout.cp:
            problems.append(
                f"head-exchange: {length} tokens (data.seq_length) cannot be shared by "
                f"cp={layout.cp} ranks; use {length - length % layout.cp + layout.cp}"
            )
        return problems

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> c.SequencePartition | None:
        return EqualParts() if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any
    ) -> c.Wrapper[c.AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import HeadExchangeKernel

        return lambda inner: HeadExchangeKernel(inner, groups.cp)
