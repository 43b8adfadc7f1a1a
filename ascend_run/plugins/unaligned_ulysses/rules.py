"""What cannot be split this way either, each with the values that would work. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ascend_run.ops.attention.kv_cache import kv_cache_problems
from ascend_run.plugin_api import AttentionFeatures, Layout, RunConfig

from .partition import UnevenParts

if TYPE_CHECKING:
    from . import UnalignedUlyssesConfig

LETS_THROUGH: Final = AttentionFeatures.all_but()


def problems(config: RunConfig, layout: Layout, options: UnalignedUlyssesConfig) -> Iterator[str]:
    """What core does not say already of tensor parallelism."""
    heads, tp, cp = config.model.num_attention_heads, layout.tp, layout.cp
    if cp <= 1:
        return
    yield from kv_cache_problems("unaligned-ulysses", options, config.model.num_layers)
    if heads % tp == 0 and heads // tp < cp:
        yield (
            f"unaligned-ulysses: {heads // tp} heads of a tensor-parallel rank "
            f"(model.num_attention_heads={heads} over tp={tp}) are fewer than "
            f"parallel.context_parallel_size={cp}; use at most {heads // tp}"
        )
    length, unit = config.data.seq_length, UnevenParts.of(config).unit
    if length // unit < cp:
        each = "a position" if unit == 1 else f"{unit} positions, one for each tensor-parallel rank"
        yield (
            f"unaligned-ulysses: data.seq_length={length} is too short to give each of {cp} ranks "
            f"(parallel.context_parallel_size) {each}; use at least {cp * unit}"
        )
