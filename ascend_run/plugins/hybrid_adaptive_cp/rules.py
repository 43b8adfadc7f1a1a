"""What cannot be split this way, each with the values that would work. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.plugin_api import Layout, RunConfig, divisors, one_of


def problems(config: RunConfig, layout: Layout, degree: int) -> Iterator[str]:
    """What core does not say already of tensor parallelism and of the sequence's length."""
    cp, tp, heads = layout.cp, layout.tp, config.model.num_attention_heads
    if cp <= 1:
        return
    if cp % degree:
        yield (
            f"hybrid-adaptive-cp: plugins.hybrid-adaptive-cp.ulysses_degree={degree} does not "
            f"divide parallel.context_parallel_size={cp}; use {one_of(divisors(cp))}"
        )
    elif heads % tp == 0 and heads // tp % degree:
        fitting = [number for number in divisors(cp) if heads // tp % number == 0]
        yield (
            f"hybrid-adaptive-cp: {heads} heads (model.num_attention_heads) cannot be split over "
            f"tp={tp} x plugins.hybrid-adaptive-cp.ulysses_degree={degree}; use a degree of "
            f"{one_of(fitting)}"
        )
