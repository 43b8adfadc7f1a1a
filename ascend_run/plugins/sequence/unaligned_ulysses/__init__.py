"""Unaligned Ulysses: Ulysses for sequence lengths and head counts that the ranks do not divide."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ascend_run.ops.attention.context_parallel.options import FullKvCacheOptions
from ascend_run.ops.attention.context_parallel.plan import ContextParallelPlan
from ascend_run.plugin_api import Layout, RunConfig
from ascend_run.plugins.sequence import ContextParallelPlugin, exchange_manifest

from .partition import UnevenParts


@attrs.frozen(kw_only=True)
class UnalignedUlyssesConfig(FullKvCacheOptions):
    """Options, set by ``plugins.unaligned-ulysses.<field>=<value>``."""


class UnalignedUlysses(ContextParallelPlugin[UnalignedUlyssesConfig]):
    """Extend ``ulysses`` to uneven shards: the first ranks hold one head and one position more.

    Cost: four all-to-alls per layer and step. Numerics: attention within a head is unchanged;
    gradients are summed over ranks in a different reduction order. Source: arXiv:2309.14509.
    """

    manifest = exchange_manifest(
        "unaligned-ulysses",
        "ulysses for numbers of ranks that divide neither the sequence nor the heads",
        in_blocks=False,
        source="DeepSpeed-Ulysses, arXiv:2309.14509",
    )
    config_class = UnalignedUlyssesConfig

    def plan(self, config: RunConfig) -> ContextParallelPlan:
        size = config.parallel.context_parallel_size
        return ContextParallelPlan(
            plugin=self.manifest.name,
            size=size,
            partition=UnevenParts.of(config),
            keys="heads",
            head_degree=size,
            kv_cache=self.config,
        )

    def problems(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        yield from super().problems(config, layout)
        heads, tp, cp = config.model.num_attention_heads, layout.tp, layout.cp
        if heads % tp == 0 and heads // tp < cp:
            yield (
                f"unaligned-ulysses: {heads // tp} heads of a tensor-parallel rank "
                f"(model.num_attention_heads={heads} over tp={tp}) are fewer than "
                f"parallel.context_parallel_size={cp}; use at most {heads // tp}"
            )
        length, unit = config.data.seq_length, UnevenParts.of(config).unit
        if config.model.moe_pad_expert_input_to_capacity and length % (unit * cp):
            yield (
                "unaligned-ulysses: model.moe_pad_expert_input_to_capacity=true needs as many "
                f"tokens on every rank, and data.seq_length={length} is not a multiple of "
                f"{unit * cp}; set it to false"
            )
        if length // unit < cp:
            each = (
                "a position"
                if unit == 1
                else f"{unit} positions, one for each tensor-parallel rank"
            )
            yield (
                f"unaligned-ulysses: data.seq_length={length} is too short to give each of {cp} "
                f"ranks (parallel.context_parallel_size) {each}; use at least {cp * unit}"
            )
