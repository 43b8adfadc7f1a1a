"""Format groups of ranks, abbreviated if there are many."""

from __future__ import annotations

from collections.abc import Sequence

_RANKS_SHOWN = 12
_GROUPS_SHOWN = 8
_WORDS_SHOWN = 48
"""Maximum number of ranks on a line, over all groups."""


def group_words(groups: Sequence[Sequence[int]]) -> str:
    """Format as ``[0 1] [2 3]``; if there are many, their number and the first ones."""
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
