"""Hybrid context parallelism: Ulysses within groups of ranks, ring attention between them."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import (
    HeadDegreeOptions,
    SharedSequenceOptions,
)
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class HybridCpConfig(HeadDegreeOptions, SharedSequenceOptions):
    """Options, set by ``plugins.hybrid-cp.<field>=<value>``."""

    window: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Ranks of an inner ring, which exchange keys before they receive those of another window, as
    in ``double-ring``; default: all ranks of the ring. Unit: ranks."""


class HybridCp(ContextParallelPlugin[HybridCpConfig]):
    """Run an all-to-all over heads within groups of U ranks, and a ring between groups.

    Cost: four all-to-alls among U ranks, and the sends of a ring of P / U groups, each with U times
    as many positions and 1 / U of the heads. Numerics: a different reduction order over keys.
    Source: USP, arXiv:2405.07719.
    """

    manifest = exchange_manifest(
        "hybrid-cp",
        "context parallelism: all-to-all of heads among neighbours, KV round a ring",
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"hybrid_cp_algo": True}),
            *option_flags("hybrid-cp", "ulysses_degree", "window", "partition", "kv_cache"),
        ),
        source="USP: a unified sequence parallelism, arXiv:2405.07719",
    )
    config_class = HybridCpConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition,
            keys="ring",
            head_degree=self.config.ulysses_degree,
            window=self.config.window,
            kv_cache=self.config,
        )
