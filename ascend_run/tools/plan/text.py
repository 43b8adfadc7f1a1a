"""The plan as text; long lists are abbreviated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_run.core.hooks import Hooks
from ascend_run.tools.terminal.rank_groups import group_words
from ascend_run.tools.terminal.tables import table

from .activations import activation_lines

if TYPE_CHECKING:
    from ascend_run.prepare.plan.records import Bundle, Plan
    from ascend_run.prepare.prepare import PreparedRun
    from ascend_run.types.layout import Layout

_RANKS_SHOWN = 256
_ROWS_SHOWN = 8
_FEW = 3
"""Number of rows of a long list that are shown before the last one."""


def plan_lines(prepared: PreparedRun, everything: bool) -> Iterator[str]:
    from .cost_records import cost_of
    from .cost_text import cost_lines

    plan = prepared.plan
    yield "plugins, innermost first"
    yield from _indented(_plugins(plan))
    if plan.level is not None:
        yield ""
        yield from _level(plan.level)
    yield ""
    yield "hooks, in the order in which a run reaches them"
    yield from _indented(_hooks(plan))
    yield ""
    if plan.forwards:
        yield "links around forwards, innermost first"
        yield from _indented(_forwards(plan))
        yield ""
    if activations := [*activation_lines(prepared.config, Hooks(prepared.instances()))]:
        yield "activations that are recomputed, discarded or offloaded"
        yield from _indented(activations)
        yield ""
    yield "claims"
    yield from _indented(f"{claim}: {owner}" for claim, owner in plan.claims.items())
    yield ""
    yield from _layout(plan, prepared.layout, prepared.config.model.mtp_num_layers or 0)
    if (cost := cost_of(plan)) is not None:
        yield ""
        yield from cost_lines(cost)
    data = prepared.config.data
    if len(data.train) > 1:
        yield ""
        yield "training data"
        yield from _indented(_blend(data.train, data.train_weights))
    for title, lines in _extras(plan).items():
        yield ""
        yield title
        yield from _indented(lines)
    yield ""
    yield "settings" if everything else "settings that are not defaults (--all shows all)"
    yield from _indented(_settings(prepared, everything))


def _plugins(plan: Plan) -> Iterator[str]:
    rows = [
        (p.name, p.kind, f"{p.distribution} {p.version}", p.numerics, p.why) for p in plan.plugins
    ]
    yield from table(("name", "kind", "from", "numerics", "why"), rows)
    for name, condition in plan.idle.items():
        yield f"note: '{name}' has no effect in this run, because {condition}"


def _level(bundle: Bundle) -> Iterator[str]:
    yield f"level {bundle.level} adds {', '.join(bundle.members) or 'nothing'}"
    if bundle.left_out:
        yield from _indented(table(("left out", "why"), [*bundle.left_out.items()]))


def _hooks(plan: Plan) -> Iterator[str]:
    rows = [(h.hook, h.kind, ", ".join(h.owners), h.why) for h in plan.hooks]
    yield from table(("hook", "kind", "owners", "why"), rows)


def _forwards(plan: Plan) -> Iterator[str]:
    rows = [(f.module, ", ".join(f.links) or "none", ", ".join(f.compilers)) for f in plan.forwards]
    yield from table(("module", "links", "compiled, or excluded from graphs, by"), rows)


def _layout(plan: Plan, layout: Layout, mtp_layers: int) -> Iterator[str]:
    yield f"ranks: {layout.world_size} = {_product(plan.layout.axes)}"
    if layout.ep > 1 or layout.expt_tp > 1:
        yield f"  experts: {_product(plan.layout.expert_axes)}"
    yield from _indented(_drawing(plan, layout))
    yield from _indented(_stages(plan.layout.stages))
    if mtp_layers:
        named = "1 layer" if mtp_layers == 1 else f"{mtp_layers} layers"
        yield f"  pp {layout.pp - 1} holds {named} of multi-token prediction besides"
    for name, groups in plan.layout.groups.items():
        if any(len(ranks) > 1 for ranks in groups):
            yield f"  {name} groups: {group_words(groups)}"


def _product(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def _drawing(plan: Plan, layout: Layout) -> Iterator[str]:
    """One block per pipeline stage; a row per data-parallel rank, a column per (cp, tp)."""
    if layout.world_size > _RANKS_SHOWN:
        yield from _blocks(layout)
        return
    columns = [(cp, tp) for cp in range(layout.cp) for tp in range(layout.tp)]
    at = {(r.pp, r.dp, r.cp, r.tp): str(r.rank) for r in plan.ranks}
    for stage in range(layout.pp):
        header = (f"pp {stage}", *(f"cp {cp} tp {tp}" for cp, tp in columns))
        rows = [
            (f"dp {replica}", *(at[stage, replica, cp, tp] for cp, tp in columns))
            for replica in range(layout.dp)
        ]
        yield from table(header, rows)


def _blocks(layout: Layout) -> Iterator[str]:
    """One line per pipeline stage: the ranks of its first replicas, and of its last."""
    each, replicas = layout.tp * layout.cp, layout.dp
    stages = []
    for stage in range(layout.pp):
        first = stage * replicas * each
        starts = [first + each * i for i in range(replicas)]
        shown = [f"{start}-{start + each - 1}" if each > 1 else str(start) for start in starts]
        words = " ".join(shown) if replicas <= _FEW + 1 else f"{' '.join(shown[:_FEW])} ..."
        words += "" if replicas <= _FEW + 1 else f" {shown[-1]}"
        ranks = "rank" if each == 1 else "ranks"
        stages.append((f"pp {stage}", f"{replicas} replicas of {each} {ranks}", words))
    yield from table(("stage", "holds", "ranks, replica by replica"), _elided(stages))


def _elided(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first rows and the last one, with the number of omitted rows between them."""
    if len(rows) <= _ROWS_SHOWN:
        return [*rows]
    more = (f"and {len(rows) - _FEW - 1} more", *("" for _ in rows[0][1:]))
    return [*rows[:_FEW], more, rows[-1]]


def _stages(stages: Sequence[Sequence[Sequence[int]]]) -> Iterator[str]:
    """One line per pipeline rank: the layers of each of its chunks."""
    if len(stages) == 1:
        return
    lines = []
    for rank, chunks in enumerate(stages):
        shown = [f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in chunks]
        lines.append((f"pp {rank} holds layers {', then '.join(shown)}",))
    yield from (line for (line,) in _elided(lines))


def _blend(names: Sequence[str], weights: Sequence[float]) -> Iterator[str]:
    if not weights:
        yield from names
        yield "(no data.train_weights; token files are read in proportion to their tokens)"
        return
    rows = [
        (name, f"{weight:g}", f"{100 * weight / sum(weights):.2f} %")
        for name, weight in zip(names, weights, strict=True)
    ]
    yield from table(("dataset", "weight", "share of the samples"), rows)


def _extras(plan: Plan) -> dict[str, Sequence[str]]:
    """Sections that only some runs have."""
    found = {
        "process groups of plugins": plan.process_groups,
        "environment": [f"{name}={value}" for name, value in plan.environment.items()],
        "plugins that patch functions of other packages for the run": plan.patching,
    }
    return {title: lines for title, lines in found.items() if lines}


def _settings(prepared: PreparedRun, everything: bool) -> Iterator[str]:
    from .chosen_values import chosen_values

    values = chosen_values(prepared.resolved, everything=everything)
    rows = [(key, _shown(value), origin) for key, value, origin in values]
    yield from table(("key", "value", "from"), rows)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
