"""Thousands of ranks as blocks: a square a data-parallel replica of each pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ascend_run.entrypoints.rank_words import group_words

from .markup import Markup, element, table

_SQUARES: Final = 4096
"""Drawn at most; beyond that a square stands for several replicas."""
_SIDE: Final = 12
_COLUMNS: Final = 40


def blocks(
    ranks: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[Sequence[int]]]
) -> Iterator[Markup]:
    """A block a stage, and the groups in words.

    Args:
        ranks: Every rank with its place along each axis.
    """
    replicas: dict[int, dict[int, list[int]]] = {}
    for rank in ranks:
        stage = replicas.setdefault(place(rank, "pp"), {})
        stage.setdefault(place(rank, "dp"), []).append(rank["rank"])
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


def place(rank: Mapping[str, Any], axis: str) -> int:
    """Position along an axis; 0 where the plan has none."""
    found = rank.get(axis, 0)
    return found if type(found) is int else 0


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
