"""Tensors that several ``mp_rank_*`` files hold: norms on tensor-parallel ranks, everything but
experts on expert-parallel ranks. Their bits must be equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ascend_run.tools.convert.differences import difference

from .mp_rank_files import MpRankFiles
from .shard_layout import Rank


def differing_copies(
    parameter: str, files: MpRankFiles, chunk: int, copies: Iterable[tuple[str, list[Rank]]]
) -> Iterator[str]:
    """Yield a message for each copy that differs from the first.

    Args:
        parameter: Its name in the full model, for the messages.
        copies: Name in the files, and the ranks whose files have it.
    """
    for name, (first, *others) in copies:
        for rank in others:
            one, other = (files.ranks[r][chunk].get(name) for r in (first, rank))
            where = f"{files.rank_folders[first]} and {files.rank_folders[rank]}"
            if one is None or other is None:
                yield f"{parameter}: of {where}, one has no {name}"
            elif found := difference(one, other):
                yield f"{parameter} differs between {where}: {found.text}"
