"""Which ranks exchange heads, and which send each other keys. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import Layout

HEADS: Final = "hybrid_adaptive_cp_heads"
"""Neighbours, that exchange heads for sequence."""
KEYS: Final = "hybrid_adaptive_cp_keys"
"""Ranks a degree apart, that send each other keys."""


def rank_lists(layout: Layout, degree: int) -> dict[str, list[tuple[int, ...]]]:
    """Both, of every context-parallel group; none where the degree does not divide it."""
    if layout.cp <= 1 or layout.cp % degree:
        return {}
    found: dict[str, list[tuple[int, ...]]] = {HEADS: [], KEYS: []}
    for ranks in layout.groups("cp"):
        found[HEADS] += [ranks[i : i + degree] for i in range(0, layout.cp, degree)]
        found[KEYS] += [ranks[i::degree] for i in range(degree)]
    return found
