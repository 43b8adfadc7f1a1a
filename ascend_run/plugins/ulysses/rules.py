"""What Ulysses cannot split, each with the values that would work. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import AttentionFeatures, Layout, RunConfig, divisors, one_of

LETS_THROUGH: Final = AttentionFeatures.all_but("bias")
"""A bias would have to be cut along its heads while its queries are this rank's only."""


def problems(config: RunConfig, layout: Layout) -> list[str]:
    """What core does not say already of tensor parallelism and of the sequence's length."""
    heads, tp = config.model.num_attention_heads, layout.tp
    if layout.cp <= 1 or heads % tp or heads // tp % layout.cp == 0:
        return []
    problem = (
        f"ulysses: {heads} heads (model.num_attention_heads) cannot be split over "
        f"tp={tp} x cp={layout.cp}; use a parallel.context_parallel_size of "
        f"{one_of(divisors(heads // tp))}"
    )
    return [problem]
