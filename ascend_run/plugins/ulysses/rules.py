"""What Ulysses cannot split, each with the values that would work. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, RunConfig


def problems(config: RunConfig, layout: Layout) -> list[str]:
    """One sentence for each size that does not divide."""
    if layout.cp <= 1:
        return []
    found = []
    heads, tp = config.model.num_attention_heads, layout.tp
    if heads % (layout.cp * tp):
        found.append(
            f"ulysses: {heads} heads (model.num_attention_heads) cannot be split over "
            f"tp={tp} x cp={layout.cp}; use a parallel.context_parallel_size that "
            + (
                f"divides {heads // tp} ({_divisors(heads // tp)})"
                if heads % tp == 0
                else f"goes with a tp that divides {heads} ({_divisors(heads)})"
            )
        )
    length = config.data.seq_length
    if length % layout.cp:
        below, above = length - length % layout.cp, length + -length % layout.cp
        lengths = f"{below} or {above}" if below else f"{above}"
        found.append(
            f"ulysses: a sequence of {length} tokens (data.seq_length) cannot be split over "
            f"cp={layout.cp}; use {lengths}, or a parallel.context_parallel_size that divides "
            f"{length} ({_divisors(length)})"
        )
    return found


def _divisors(number: int, at_most: int = 64) -> str:
    """The divisors that a layout may use, as text."""
    return ", ".join(str(d) for d in range(1, min(number, at_most) + 1) if number % d == 0)
