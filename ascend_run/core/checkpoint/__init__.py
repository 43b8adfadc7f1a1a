"""Checkpoints of a run: saved atomically, loadable with any parallel layout."""

from .ranks import GroupRanks, Ranks, SingleRank
from .selection import Choice, CorruptCheckpoint, choose
from .store import FileStore, layout_sizes

__all__ = [
    "Choice",
    "CorruptCheckpoint",
    "FileStore",
    "GroupRanks",
    "Ranks",
    "SingleRank",
    "choose",
    "layout_sizes",
]
