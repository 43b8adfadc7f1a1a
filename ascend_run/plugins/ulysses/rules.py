"""What Ulysses cannot split, each with the values that would work. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.ops.attention.kv_cache import kv_cache_problems
from ascend_run.plugin_api import AttentionFeatures, Layout, RunConfig, divisors, one_of

if TYPE_CHECKING:
    from . import UlyssesConfig

LETS_THROUGH: Final = AttentionFeatures.all_but()


def problems(config: RunConfig, layout: Layout, options: UlyssesConfig) -> Iterator[str]:
    """What core does not say already of tensor parallelism and of the sequence's length."""
    heads, tp = config.model.num_attention_heads, layout.tp
    if layout.cp <= 1:
        return
    yield from kv_cache_problems("ulysses", options, config.model.num_layers)
    if heads % tp:
        return
    if heads // tp % layout.cp:
        yield (
            f"ulysses: {heads} heads (model.num_attention_heads) cannot be split over "
            f"tp={tp} x cp={layout.cp}; use a parallel.context_parallel_size of "
            f"{one_of(divisors(heads // tp))}, or --enable unaligned-ulysses instead"
        )
    groups = config.model.get("num_query_groups") or heads
    if options.kv == "all-gather" and groups != tp:
        yield (
            f"ulysses: plugins.ulysses.kv=all-gather needs one key-value head on each "
            f"tensor-parallel rank, and model.num_query_groups={groups} over tp={tp} is not; use "
            "kv=exchange, which never sends more"
        )
