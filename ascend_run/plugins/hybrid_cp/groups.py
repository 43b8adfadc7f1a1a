"""Which ranks exchange heads, and which pass keys to each other. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import Layout

HEADS: Final = "hybrid_cp_heads"
"""Neighbours, that exchange heads for sequence."""
WINDOW: Final = "hybrid_cp_window"
"""Members of the ring, that pass keys among themselves: ranks a degree apart."""
WINDOWS: Final = "hybrid_cp_windows"
"""The ranks in the same place of every window."""


def rank_lists(layout: Layout, degree: int, window: int | None) -> dict[str, list[tuple[int, ...]]]:
    """All three, of every context-parallel group; none where the sizes do not divide."""
    if layout.cp <= 1 or layout.cp % degree or layout.cp // degree % (window or 1):
        return {}
    found: dict[str, list[tuple[int, ...]]] = {HEADS: [], WINDOW: [], WINDOWS: []}
    for ranks in layout.groups("cp"):
        found[HEADS] += [ranks[i : i + degree] for i in range(0, layout.cp, degree)]
        for ring in (ranks[i::degree] for i in range(degree)):
            size = window or len(ring)
            found[WINDOW] += [ring[i : i + size] for i in range(0, len(ring), size)]
            found[WINDOWS] += [ring[i::size] for i in range(size)]
    return found
