"""Hybrid adaptive context parallelism: Ulysses within groups, adaptive exchange between them."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import AdaptiveOptions, HeadDegreeOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class HybridAdaptiveCpConfig(HeadDegreeOptions, AdaptiveOptions):
    """Options, set by ``plugins.hybrid-adaptive-cp.<field>=<value>``."""


class HybridAdaptiveCp(ContextParallelPlugin[HybridAdaptiveCpConfig]):
    """Run an all-to-all over heads within groups of U ranks, and adaptive CP between groups.

    Cost: four all-to-alls among U ranks, and the sends of ``adaptive-cp`` among P / U groups, each
    with U times as many positions and 1 / U of the heads. Numerics: a different reduction order
    over keys. Source: the hybrid adaptive context parallelism of MindSpeed.
    """

    manifest = exchange_manifest(
        "hybrid-adaptive-cp",
        "context parallelism: all-to-all of heads among neighbours, KV routed by the mask",
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"hybrid_adaptive_cp_algo": True}),
            *option_flags("hybrid-adaptive-cp", "ulysses_degree", "remap"),
        ),
        source="the hybrid adaptive context parallelism of MindSpeed",
    )
    config_class = HybridAdaptiveCpConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition(config.model.window_size),
            keys="mask",
            head_degree=self.config.ulysses_degree,
        )
