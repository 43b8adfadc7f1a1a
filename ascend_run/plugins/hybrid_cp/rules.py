"""What cannot be split this way, each with the values that would work. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_run.ops.attention.kv_cache import kv_cache_problems
from ascend_run.plugin_api import Layout, RunConfig, divisors, one_of

if TYPE_CHECKING:
    from . import HybridCpConfig


def problems(config: RunConfig, layout: Layout, options: HybridCpConfig) -> Iterator[str]:
    """What core does not say already of tensor parallelism and of the sequence's length."""
    cp, tp, heads = layout.cp, layout.tp, config.model.num_attention_heads
    degree, window = options.ulysses_degree, options.window
    if cp <= 1:
        return
    yield from kv_cache_problems("hybrid-cp", options, config.model.num_layers)
    if cp % degree:
        yield (
            f"hybrid-cp: plugins.hybrid-cp.ulysses_degree={degree} does not divide "
            f"parallel.context_parallel_size={cp}; use {one_of(divisors(cp))}"
        )
        return
    if heads % tp == 0 and heads // tp % degree:
        fitting = [number for number in divisors(cp) if heads // tp % number == 0]
        yield (
            f"hybrid-cp: {heads} heads (model.num_attention_heads) cannot be split over tp={tp} x "
            f"plugins.hybrid-cp.ulysses_degree={degree}; use a degree of {one_of(fitting)}"
        )
    ring = cp // degree
    if window is not None and ring % window:
        yield (
            f"hybrid-cp: plugins.hybrid-cp.window={window} does not divide the ring of {ring} "
            f"(parallel.context_parallel_size={cp} / ulysses_degree={degree}); use a window of "
            f"{one_of(divisors(ring))}"
        )
