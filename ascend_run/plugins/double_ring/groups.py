"""Which ranks pass keys to each other. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import Layout

WINDOW: Final = "double_ring_window"
"""Neighbours, in the order in which they hold the sequence."""
WINDOWS: Final = "double_ring_windows"
"""The ranks in the same place of every window."""


def rank_lists(layout: Layout, window: int) -> dict[str, list[tuple[int, ...]]]:
    """Both, of every context-parallel group; none where the window does not divide it."""
    if layout.cp <= 1 or layout.cp % window:
        return {}
    found: dict[str, list[tuple[int, ...]]] = {WINDOW: [], WINDOWS: []}
    for ranks in layout.groups("cp"):
        found[WINDOW] += [ranks[i : i + window] for i in range(0, layout.cp, window)]
        found[WINDOWS] += [ranks[i::window] for i in range(window)]
    return found
