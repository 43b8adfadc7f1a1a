"""Ulysses: split a sequence over ranks, and exchange it for heads around the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.plugin_api import Claim, Condition, Manifest, Numerics, Support, hookimpl

from .partition import ContiguousPartition
from .rules import problems

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, RunConfig
    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class UlyssesConfig:
    """It has no options: ``parallel.context_parallel_size`` is the number of ranks."""


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
            "npu": Support.UNVERIFIED,
        },
        level=2,
        legacy_flags=("--context-parallel-algo ulysses_cp_algo",),
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = UlyssesConfig

    def __init__(self, config: UlyssesConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return problems(config, layout)

    @hookimpl
    def ascend_sequence_partition(self, config: RunConfig) -> c.SequencePartition | None:
        return ContiguousPartition() if config.parallel.context_parallel_size > 1 else None

    @hookimpl
    def ascend_attention(
        self, config: RunConfig, groups: Any
    ) -> c.Wrapper[c.AttentionKernel] | None:
        if config.parallel.context_parallel_size <= 1:
            return None
        from .kernel import UlyssesKernel

        return lambda inner: UlyssesKernel(inner, groups.cp)
