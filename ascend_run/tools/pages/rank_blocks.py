"""Draw thousands of ranks as blocks: one square per pipeline stage and data-parallel replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ascend_run.prepare.plan.records import PlannedRank
from ascend_run.tools.terminal.rank_groups import group_words
from ascend_run.types.layout import RankLists

from .markup import Markup, element, table

_SQUARES: Final = 4096
"""Maximum number of squares; with more replicas, a square stands for several."""
_SIDE: Final = 12
_COLUMNS: Final = 40


def blocks(ranks: Sequence[PlannedRank], groups: Mapping[str, RankLists]) -> Iterator[Markup]:
    """Yield one block per stage, and the groups as text.

    Args:
        ranks: All ranks with their coordinates.
    """
    replicas: dict[int, dict[int, list[int]]] = {}
    for rank in ranks:
        stage = replicas.setdefault(rank.pp or 0, {})
        stage.setdefault(rank.dp or 0, []).append(rank.rank)
    total = sum(map(len, replicas.values()))
    together = math.ceil(total / _SQUARES)
    each = "a square is one model replica" if together == 1 else f"a square is {together} replicas"
    yield element("p", f"{each}; hover for its ranks", class_="note")
    yield element(
        "div",
        *(_stage(stage, of, together) for stage, of in sorted(replicas.items())),
        class_="stages",
    )
    rows = [[name, group_words(lists)] for name, lists in groups.items()]
    yield table(("group", "ranks"), rows)


def _stage(stage: int, replicas: Mapping[int, Sequence[int]], together: int) -> Markup:
    order = sorted(replicas)
    squares = [order[i : i + together] for i in range(0, len(order), together)]
    columns = min(_COLUMNS, len(squares))
    rows = math.ceil(len(squares) / columns)
    everything = [rank for ranks in replicas.values() for rank in ranks]
    drawn = [
        element(
            "rect",
            element("title", _told(stage, members, replicas)),
            x=1 + _SIDE * (i % columns),
            y=1 + _SIDE * (i // columns),
            width=_SIDE - 2,
            height=_SIDE - 2,
            rx=2,
            class_=f"p{stage % 5}",
        )
        for i, members in enumerate(squares)
    ]
    width, height = _SIDE * columns, _SIDE * rows
    caption = f"pipeline stage {stage}: ranks {min(everything):,} to {max(everything):,}"
    picture = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=caption,
        class_="blocks",
    )
    return element("figure", element("figcaption", caption), picture, class_="stage-block")


def _told(stage: int, members: Sequence[int], replicas: Mapping[int, Sequence[int]]) -> str:
    ranks = [rank for member in members for rank in replicas[member]]
    who = f"dp {members[0]}" + (f" to {members[-1]}" if len(members) > 1 else "")
    return f"pp {stage}, {who}: ranks {min(ranks):,} to {max(ranks):,}"
