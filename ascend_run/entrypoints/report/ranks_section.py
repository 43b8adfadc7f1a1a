"""The ranks as a grid: a block a pipeline stage, a row a data-parallel replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .markup import Markup, details, element, join, table
from .rank_blocks import blocks, place
from .run_folder import RunData, items, mapping

_SHOWN: Final = 1024
_AXES: Final = ("tp", "cp", "dp", "pp", "ep")


def ranks_section(run: RunData) -> Markup | None:
    """The grid, with a button for each kind of group; None where the plan has no ranks."""
    ranks = [rank for rank in items(run.plan.get("ranks")) if type(rank.get("rank")) is int]
    if not ranks:
        return None
    layout = mapping(run.plan.get("layout"))
    groups = _groups(layout)
    if len(ranks) > _SHOWN:
        lead = element("p", _sizes(layout, len(ranks)), class_="lead")
        return join([lead, *blocks(ranks, groups)])
    stages: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    for rank in ranks:
        stages.setdefault(place(rank, "pp"), {}).setdefault(place(rank, "dp"), []).append(rank)
    grids = [_stage(stage, rows, groups, len(stages)) for stage, rows in sorted(stages.items())]
    return join(
        [
            element("p", _sizes(layout, len(ranks)), class_="lead"),
            _buttons(groups),
            element("div", *grids, class_="stages"),
            details("Process groups as lists of ranks", _group_table(groups)) if groups else None,
        ]
    )


def group_membership(run: RunData) -> dict[str, dict[str, int]]:
    """Group name -> rank -> index of the rank's group, for the page's script; none where the ranks
    are drawn in blocks."""
    if len(items(run.plan.get("ranks"))) > _SHOWN:
        return {}
    groups = _groups(mapping(run.plan.get("layout")))
    return {
        name: {str(rank): i for i, members in enumerate(lists) for rank in members}
        for name, lists in groups.items()
    }


def _groups(layout: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Groups with more than one member somewhere, by name."""
    found = {}
    for name, lists in mapping(layout.get("groups")).items():
        if not isinstance(lists, list):
            continue
        members = [
            [r for r in ranks if type(r) is int] for ranks in lists if isinstance(ranks, list)
        ]
        if any(len(ranks) > 1 for ranks in members):
            found[str(name)] = members
    return found


def _stage(
    stage: int,
    rows: Mapping[int, list[Mapping[str, Any]]],
    groups: Mapping[str, Any],
    stages: int,
) -> Markup:
    lines = [
        element(
            "tr",
            element("th", f"dp {replica}", scope="row"),
            *(
                _rank(rank)
                for rank in sorted(ranks, key=lambda r: (place(r, "cp"), place(r, "tp")))
            ),
        )
        for replica, ranks in sorted(rows.items())
    ]
    caption = element("caption", f"pipeline stage {stage}") if stages > 1 else None
    grid = element("table", caption, element("tbody", *lines), class_="ranks")
    return element("div", grid, class_="scroll", tabindex=0)


def _rank(rank: Mapping[str, Any]) -> Markup:
    number = rank["rank"]
    place = " \N{MIDDLE DOT} ".join(f"{axis} {rank[axis]}" for axis in _AXES if axis in rank)
    return element(
        "td",
        element("b", str(number)),
        element("small", place),
        element("small", class_="group"),
        data_rank=number,
        title=f"rank {number}: {place}",
    )


def _buttons(groups: Mapping[str, Any]) -> Markup | None:
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


def _group_table(groups: Mapping[str, list[list[int]]]) -> Markup:
    return table(
        ("group", "ranks"),
        [[name, "  ".join(str(ranks) for ranks in lists)] for name, lists in groups.items()],
    )


def _sizes(layout: Mapping[str, Any], ranks: int) -> str:
    world = layout.get("world_size", ranks)
    parts = [f"{world} {'rank' if world == 1 else 'ranks'}"]
    for title, key in (("", "axes"), ("experts: ", "expert_axes")):
        sizes = [f"{name} {size}" for name, size in mapping(layout.get(key)).items()]
        if sizes:
            parts.append(title + ", ".join(sizes))
    return "; ".join(parts)
