"""The plan as lines of text: by kind, with counts where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .rank_words import group_words
from .tables import table

if TYPE_CHECKING:
    from .planning import Prepared

_RANKS_SHOWN = 256
_ROWS_SHOWN = 8
_FEW = 3
"""Rows of a long list that are shown before the last."""


def plan_lines(prepared: Prepared, everything: bool) -> Iterator[str]:
    from .plan_costs import cost_lines

    plan = prepared.plan
    yield "plugins, innermost first"
    yield from _indented(_plugins(plan))
    if "level" in plan:
        yield ""
        yield from _level(plan["level"])
    yield ""
    yield "hooks, in the order in which a run reaches them"
    yield from _indented(_hooks(plan))
    yield ""
    yield "claims"
    yield from _indented(f"{claim}: {owner}" for claim, owner in plan["claims"].items())
    yield ""
    yield from _layout(plan)
    yield ""
    yield from cost_lines(plan["cost"])
    for title, lines in _extras(plan).items():
        yield ""
        yield title
        yield from _indented(lines)
    yield ""
    yield "settings" if everything else "settings that are not defaults (--all shows all)"
    yield from _indented(_settings(prepared, everything))


def _plugins(plan: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (p["name"], p["kind"], f"{p['distribution']} {p['version']}", p["numerics"], p["why"])
        for p in plan["plugins"]
    ]
    yield from table(("name", "kind", "from", "numerics", "why"), rows)
    for name, condition in plan["idle"].items():
        yield f"note: '{name}' changes nothing in this run, as {condition}"


def _level(bundle: Mapping[str, Any]) -> Iterator[str]:
    members = ", ".join(bundle["members"]) or "nothing"
    yield f"level {bundle['level']} adds {members}"
    if bundle["left_out"]:
        yield from _indented(table(("left out", "why"), bundle["left_out"].items()))


def _hooks(plan: Mapping[str, Any]) -> Iterator[str]:
    rows = [(h["hook"], h["kind"], ", ".join(h["owners"]), h["why"]) for h in plan["hooks"]]
    yield from table(("hook", "kind", "owners", "why"), rows)


def _layout(plan: Mapping[str, Any]) -> Iterator[str]:
    layout = plan["layout"]
    dense, expert = (
        " x ".join(f"{axis} {size}" for axis, size in layout[axes].items())
        for axes in ("axes", "expert_axes")
    )
    yield f"ranks: {layout['world_size']} = {dense}"
    if layout["expert_axes"]["ep"] > 1 or layout["expert_axes"]["expt_tp"] > 1:
        yield f"  experts: {expert}"
    yield from _indented(_drawing(plan))
    yield from _indented(_stages(layout["stages"]))
    for name, groups in layout["groups"].items():
        if any(len(ranks) > 1 for ranks in groups):
            yield f"  {name} groups: {group_words(groups)}"


def _drawing(plan: Mapping[str, Any]) -> Iterator[str]:
    """A block a pipeline stage; a row a data-parallel replica, a column a (cp, tp) place."""
    axes = plan["layout"]["axes"]
    if plan["layout"]["world_size"] > _RANKS_SHOWN:
        yield from _blocks(plan)
        return
    places = [(cp, tp) for cp in range(axes["cp"]) for tp in range(axes["tp"])]
    at = {(r["pp"], r["dp"], r["cp"], r["tp"]): str(r["rank"]) for r in plan["ranks"]}
    for stage in range(axes["pp"]):
        header = (f"pp {stage}", *(f"cp {cp} tp {tp}" for cp, tp in places))
        rows = [
            (f"dp {replica}", *(at[stage, replica, cp, tp] for cp, tp in places))
            for replica in range(axes["dp"])
        ]
        yield from table(header, rows)


def _blocks(plan: Mapping[str, Any]) -> Iterator[str]:
    """A line a pipeline stage: the ranks of its first replicas, and of its last."""
    axes = plan["layout"]["axes"]
    each, replicas = axes["tp"] * axes["cp"], axes["dp"]
    stages = []
    for stage in range(axes["pp"]):
        first = stage * replicas * each
        starts = [first + each * i for i in range(replicas)]
        shown = [f"{start}-{start + each - 1}" if each > 1 else str(start) for start in starts]
        words = " ".join(shown) if replicas <= _FEW + 1 else f"{' '.join(shown[:_FEW])} ..."
        words += "" if replicas <= _FEW + 1 else f" {shown[-1]}"
        ranks = "rank" if each == 1 else "ranks"
        stages.append((f"pp {stage}", f"{replicas} replicas of {each} {ranks}", words))
    yield from table(("stage", "holds", "ranks, replica by replica"), _elided(stages))


def _elided(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first rows and the last, with a count between them where there are many."""
    if len(rows) <= _ROWS_SHOWN:
        return [*rows]
    more = (f"and {len(rows) - _FEW - 1} more", *("" for _ in rows[0][1:]))
    return [*rows[:_FEW], more, rows[-1]]


def _stages(stages: Sequence[Sequence[Sequence[int]]]) -> Iterator[str]:
    """A line a pipeline rank: the layers of each of its chunks."""
    if len(stages) == 1:
        return
    lines = []
    for rank, chunks in enumerate(stages):
        shown = [f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in chunks]
        lines.append((f"pp {rank} holds layers {', then '.join(shown)}",))
    yield from (line for (line,) in _elided(lines))


def _extras(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """What only some runs have."""
    found = {
        "process groups of plugins": plan["process_groups"],
        "environment": [f"{name}={value}" for name, value in plan["environment"].items()],
        "functions of others that are replaced for the run, by": plan["patching"],
    }
    return {title: lines for title, lines in found.items() if lines}


def _settings(prepared: Prepared, everything: bool) -> Iterator[str]:
    from .plan_data import chosen_values

    values = chosen_values(prepared.resolved, everything=everything)
    rows = [(key, _shown(value), origin) for key, value, origin in values]
    yield from table(("key", "value", "from"), rows)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
