"""Double ring attention: inner rings over fast links, and an outer ring between their windows."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import SharedSequenceOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import ANY, LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class DoubleRingConfig(SharedSequenceOptions):
    """Options, set by ``plugins.double-ring.<field>=<value>``."""

    window: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Ranks of an inner ring, which exchange keys and values before they receive those of another
    window; best the context-parallel ranks of one node. Must divide
    ``parallel.context_parallel_size``. Unit: ranks."""


class DoubleRing(ContextParallelPlugin[DoubleRingConfig]):
    """Pass keys and values round each window while those of the next window are being received.

    Cost: the sends of a ring, but only one in W crosses windows, and it overlaps with W steps of
    computation. Numerics: a different reduction order over keys. Source: LoongTrain,
    arXiv:2406.18485, section 4.3.
    """

    manifest = exchange_manifest(
        "double-ring",
        "context parallelism by rings of neighbouring ranks, and one ring of those rings",
        legacy_flags=(
            LegacyFlag(
                flag="--cp-window-size",
                values={"1": False, ANY: True},
                where={"--context-parallel-algo": "megatron_cp_algo"},
            ),
            *option_flags("double-ring", "window", "partition", "kv_cache"),
        ),
        source="LoongTrain, arXiv:2406.18485",
    )
    config_class = DoubleRingConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition,
            keys="ring",
            window=self.config.window,
            kv_cache=self.config,
        )
