"""Draw the ranks as a grid: one block per pipeline stage, one row per data-parallel replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ascend_run.prepare.plan.records import PlannedLayout, PlannedRank
from ascend_run.types.layout import RankLists

from .markup import Markup, details, element, join, table
from .rank_blocks import blocks
from .run_folder import RunData

_SHOWN: Final = 1024


def ranks_section(run: RunData) -> Markup | None:
    """Return the grid, with a button per kind of group; None if the plan has no ranks."""
    ranks, layout = run.plan.ranks, run.plan.layout
    if not ranks:
        return None
    groups = _groups(layout)
    lead = element("p", _sizes(layout, len(ranks)), class_="lead")
    if len(ranks) > _SHOWN:
        return join([lead, *blocks(ranks, groups)])
    stages: dict[int, dict[int, list[PlannedRank]]] = {}
    for rank in ranks:
        stage = stages.setdefault(rank.pp or 0, {})
        stage.setdefault(rank.dp or 0, []).append(rank)
    grids = [_stage(stage, rows, len(stages)) for stage, rows in sorted(stages.items())]
    return join(
        [
            lead,
            _buttons(groups),
            element("div", *grids, class_="stages"),
            details("Process groups as lists of ranks", _group_table(groups)) if groups else None,
        ]
    )


def group_membership(run: RunData) -> dict[str, dict[str, int]]:
    """Return group name -> rank -> index of the rank's group, for the page's script; empty if the
    ranks are drawn as blocks."""
    if len(run.plan.ranks) > _SHOWN:
        return {}
    return {
        name: {str(rank): i for i, members in enumerate(lists) for rank in members}
        for name, lists in _groups(run.plan.layout).items()
    }


def _groups(layout: PlannedLayout) -> dict[str, RankLists]:
    """Kinds of groups with more than one rank, by name."""
    return {
        name: lists
        for name, lists in layout.groups.items()
        if any(len(ranks) > 1 for ranks in lists)
    }


def _stage(stage: int, rows: Mapping[int, list[PlannedRank]], stages: int) -> Markup:
    lines = [
        element(
            "tr",
            element("th", f"dp {replica}", scope="row"),
            *(_rank(rank) for rank in sorted(ranks, key=lambda r: (r.cp or 0, r.tp or 0))),
        )
        for replica, ranks in sorted(rows.items())
    ]
    caption = element("caption", f"pipeline stage {stage}") if stages > 1 else None
    grid = element("table", caption, element("tbody", *lines), class_="ranks")
    return element("div", grid, class_="scroll", tabindex=0)


def _rank(rank: PlannedRank) -> Markup:
    coordinates = " \N{MIDDLE DOT} ".join(f"{axis} {at}" for axis, at in rank.coordinates.items())
    return element(
        "td",
        element("b", str(rank.rank)),
        element("small", coordinates),
        element("small", class_="group"),
        data_rank=rank.rank,
        title=f"rank {rank.rank}: {coordinates}",
    )


def _buttons(groups: Mapping[str, RankLists]) -> Markup | None:
    if not groups:
        return None
    buttons = [
        element("button", name, type="button", data_group=name, aria_pressed="false")
        for name in groups
    ]
    label = element("span", "Colour by group", id="colour-by", class_="control-label")
    return element(
        "div", label, *buttons, class_="buttons", role="group", aria_labelledby="colour-by"
    )


def _group_table(groups: Mapping[str, RankLists]) -> Markup:
    return table(
        ("group", "ranks"),
        [[name, "  ".join(str([*ranks]) for ranks in lists)] for name, lists in groups.items()],
    )


def _sizes(layout: PlannedLayout, ranks: int) -> str:
    world = ranks if layout.world_size is None else layout.world_size
    parts = [f"{world} {'rank' if world == 1 else 'ranks'}"]
    for title, axes in (("", layout.axes), ("experts: ", layout.expert_axes)):
        sizes = [f"{name} {size}" for name, size in axes.items()]
        if sizes:
            parts.append(title + ", ".join(sizes))
    return "; ".join(parts)
