"""Ulysses: shard a sequence over ranks, with an all-to-all over heads around the attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from ascend_run.ops.attention.context_parallel.options import FullKvCacheOptions
from ascend_run.ops.attention.context_parallel.partitions import Contiguous
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import Layout, LegacyFlag, RunConfig, divisors, one_of
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest, option_flags


@attrs.frozen(kw_only=True)
class UlyssesConfig(FullKvCacheOptions):
    """Options, set by ``plugins.ulysses.<field>=<value>``."""

    kv: Literal["exchange", "all-gather"] = "exchange"
    """How keys and values are exchanged: by the same all-to-all as the queries (``exchange``), or
    gathered by all ranks (``all-gather``), which needs one key-value head per tensor-parallel
    rank."""


class Ulysses(ContextParallelPlugin[UlyssesConfig]):
    """Shard by sequence outside the attention, and by heads inside it.

    Cost: four all-to-alls per layer and step. Numerics: attention within a head is unchanged;
    gradients are summed over ranks in a different reduction order. Source: arXiv:2309.14509.
    """

    manifest = exchange_manifest(
        "ulysses",
        "context parallelism by an all-to-all over heads around the attention",
        in_blocks=False,
        legacy_flags=(
            LegacyFlag(flag="--context-parallel-algo", values={"ulysses_cp_algo": True}),
            LegacyFlag(
                flag="--use-ulysses-allgather-kv",
                key="plugins.ulysses.kv",
                values={"": "all-gather"},
            ),
            *option_flags("ulysses", "kv_cache"),
        ),
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = UlyssesConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        size = config.parallel.context_parallel_size
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=size,
            partition=Contiguous(),
            keys="heads",
            head_degree=size,
            kv_cache=self.config,
            gathers_heads=self.config.kv == "all-gather",
        )

    def problems(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        yield from super().problems(config, layout)
        heads, tp = config.model.num_attention_heads, layout.tp
        if heads % tp:
            return
        if heads // tp % layout.cp:
            yield (
                f"ulysses: {heads} heads (model.num_attention_heads) cannot be split over "
                f"tp={tp} x cp={layout.cp}; use a parallel.context_parallel_size of "
                f"{one_of(divisors(heads // tp))}, or --enable unaligned-ulysses instead"
            )
        groups = config.model.num_query_groups or heads
        if self.config.kv == "all-gather" and groups > tp:
            yield (
                f"ulysses: plugins.ulysses.kv=all-gather needs one key-value head on each "
                f"tensor-parallel rank, got model.num_query_groups={groups} over tp={tp}; "
                "use kv=exchange, which never sends more"
            )
