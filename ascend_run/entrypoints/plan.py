"""``ascend-run plan``: what a run would be, before anything runs and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .run_options import run_options
from .tables import table

if TYPE_CHECKING:
    from .planning import Prepared

_GROUPS_SHOWN = 8
_RANKS_SHOWN = 256


@click.command("plan")
@run_options
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks on each node; default: run.nproc.")
@click.option("--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes.")
@click.option(
    "--all", "everything", is_flag=True, help="Show the values that are defaults as well."
)
@click.option("--device", help="Estimate the step's time on: ascend-910b, h100, h200, cpu, a file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as plan.json has it.")
def command(
    file: Path | None,
    enable: Sequence[str] | None,
    platform: str | None,
    task: str | None,
    overrides: Sequence[str],
    level: int | None,
    disable: Sequence[str],
    nproc: int | None,
    nnodes: int,
    everything: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Show what a run would be, before anything runs.

    Which plugin implements which hook, in which order and why; the layout of ranks;
    where each setting comes from. What cannot run is refused as training would refuse it.
    """
    from .plan_costs import on_device
    from .planning import prepare_raw, request

    own = [] if nproc is None else [f"run.nproc={nproc}"]
    raw = request(file, [*overrides, *own], enable, platform, task, level, disable)
    prepared = on_device(prepare_raw(raw, raw.nproc * nnodes), device)
    if as_json:
        click.echo(json.dumps(prepared.plan, indent=2))
    else:
        click.echo("\n".join(_page(prepared, everything)))


def _page(prepared: Prepared, everything: bool) -> Iterator[str]:
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
            yield f"  {name} groups: {_groups(groups)}"


def _drawing(plan: Mapping[str, Any]) -> Iterator[str]:
    """A block a pipeline stage; a row a data-parallel replica, a column a (cp, tp) place."""
    axes = plan["layout"]["axes"]
    if plan["layout"]["world_size"] > _RANKS_SHOWN:
        yield f"(not drawn: more than {_RANKS_SHOWN} ranks)"
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


def _stages(stages: Sequence[Sequence[Sequence[int]]]) -> Iterator[str]:
    """A line a pipeline rank: the layers of each of its chunks."""
    if len(stages) == 1:
        return
    for rank, chunks in enumerate(stages):
        shown = [f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in chunks]
        yield f"pp {rank} holds layers {', then '.join(shown)}"


def _groups(groups: Sequence[Sequence[int]]) -> str:
    shown = " ".join(f"[{' '.join(map(str, ranks))}]" for ranks in groups[:_GROUPS_SHOWN])
    more = len(groups) - _GROUPS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


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
