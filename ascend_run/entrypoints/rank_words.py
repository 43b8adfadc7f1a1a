"""Groups of ranks in a few words, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

_RANKS_SHOWN = 12
_GROUPS_SHOWN = 8
_WORDS_SHOWN = 48
"""Ranks on a line, of all groups together."""


def group_words(groups: Sequence[Sequence[int]]) -> str:
    """``[0 1] [2 3]``; where there are many, how many, the first of them, and their first ranks."""
    shown = max(1, min(_GROUPS_SHOWN, _WORDS_SHOWN // max(1, min(len(groups[0]), _RANKS_SHOWN))))
    words = " ".join(map(_ranks, groups[:shown]))
    more = len(groups) - shown
    if more <= 0 and len(groups[0]) <= _RANKS_SHOWN:
        return words
    count = f"{len(groups):,} {'group' if len(groups) == 1 else 'groups'} of {len(groups[0]):,}"
    return f"{count}: {words}" + (f" and {more:,} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return f"[{' '.join(map(str, ranks))}]"
    return f"[{' '.join(map(str, ranks[:3]))} ... {ranks[-1]}]"
