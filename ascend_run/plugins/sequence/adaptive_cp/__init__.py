"""Adaptive context parallelism: shard sequences and route keys and values by the attention mask."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import AdaptiveOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class AdaptiveCpConfig(AdaptiveOptions):
    """Options, set by ``plugins.adaptive-cp.<field>=<value>``."""


class AdaptiveCp(ContextParallelPlugin[AdaptiveCpConfig]):
    """Give every rank chunks of equal attention work, and send it only the keys that they see.

    Cost: at most P - 1 sends per layer in forward and twice as many in backward, overlapped with
    the computation; keys and values that the mask excludes are not sent. Numerics: a different
    reduction order over keys. Source: the adaptive context parallelism of MindSpeed.
    """

    manifest = exchange_manifest(
        "adaptive-cp",
        "context parallelism that follows the attention mask: send only the visible keys",
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"adaptive_cp_algo": True}),
            *option_flags("adaptive-cp", "remap"),
            LegacyFlag(flag="--adaptive-cp-dynamic-attn-mask", key="", values={}),
        ),
        source="the adaptive context parallelism of MindSpeed",
    )
    config_class = AdaptiveCpConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition(config.model.window_size),
            keys="mask",
        )
