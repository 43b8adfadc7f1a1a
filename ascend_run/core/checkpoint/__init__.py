"""Checkpoints of a run: saved whole or not at all, and loadable by any layout."""

from .choosing import Choice, CorruptCheckpoint, choose
from .ranks import GroupRanks, Ranks, SingleRank
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
