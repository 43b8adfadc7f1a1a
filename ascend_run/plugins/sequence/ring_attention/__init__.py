"""Ring attention: shard a sequence over ranks and pass keys and values round a ring."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import SharedSequenceOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import ANY, LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class RingAttentionConfig(SharedSequenceOptions):
    """Options, set by ``plugins.ring-attention.<field>=<value>``."""


class RingAttention(ContextParallelPlugin[RingAttentionConfig]):
    """Give every rank two chunks of the sequence, and pass keys and values round a ring.

    Cost: P - 1 sends per layer in forward and twice as many in backward, overlapped with the
    computation. Numerics: a different reduction order over keys. Source: arXiv:2310.01889.
    """

    manifest = exchange_manifest(
        "ring-attention",
        "context parallelism by a ring of keys and values, overlapped with the attention",
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"megatron_cp_algo": True}),
            LegacyFlag(
                flag="--cp-window-size",
                values={"1": True, ANY: False},
                where={"--context-parallel-algo": "megatron_cp_algo"},
            ),
            *option_flags("ring-attention", "partition", "kv_cache"),
            LegacyFlag(flag="--use-cp-send-recv-overlap", key="", values={}),
        ),
        source="Ring Attention with Blockwise Transformers, arXiv:2310.01889",
    )
    config_class = RingAttentionConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition,
            keys="ring",
            kv_cache=self.config,
        )
