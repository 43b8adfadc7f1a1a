"""All-gather context parallelism: every rank gathers the keys and values of all ranks."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.context_parallel.options import SharedSequenceOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import LegacyFlag, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest


@attrs.frozen(kw_only=True)
class KvAllgatherCpConfig(SharedSequenceOptions):
    """Options, set by ``plugins.kv-allgather-cp.<field>=<value>``."""

    groups_at_once: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Key-value heads of a tensor-parallel rank that are gathered at a time; default: all. With
    fewer, a rank holds less of the gathered keys and values, issues more collectives, and overlaps
    more of them with the computation. Unit: heads."""


class KvAllgatherCp(ContextParallelPlugin[KvAllgatherCpConfig]):
    """Give every rank two chunks of the sequence, and all-gather the keys and values.

    Cost: one collective per layer in forward and two in backward, with the bytes of a ring; a rank
    holds the keys and values of the full sequence during attention. Numerics: a different reduction
    order over keys. Source: arXiv:2407.21783, section 3.3.2.
    """

    manifest = exchange_manifest(
        "kv-allgather-cp",
        "context parallelism by an all-gather of keys and values",
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"kvallgather_cp_algo": True}),
        ),
        source="The Llama 3 Herd of Models, arXiv:2407.21783",
    )
    config_class = KvAllgatherCpConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=config.parallel.context_parallel_size,
            partition=self.config.partition,
            keys="gather",
            kv_cache=self.config,
            groups_at_once=self.config.groups_at_once,
        )
