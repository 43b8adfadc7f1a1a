"""Bar charts of the estimated cost: memory per stage, communication per group, time per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import attrs

from ascend_run.tools.pages.bar_chart import Bar, bar_figure, legend
from ascend_run.tools.pages.markup import Markup, details, element, join, table

from .cost_records import Cost, ExpectedTime, StageCost
from .cost_text import flops, seconds, size

_Stage: TypeAlias = tuple[str, StageCost]
"""Numbers of the stages with this estimate, and the estimate."""
_STAGES: Final = 24


def cost_section(cost: Cost) -> Markup:
    """Return all charts, and their data as tables."""
    kinds = list(_kinds(cost.stages))
    parts = [*cost.stages[0].memory.parts]
    title = "Memory of one rank, at the peak of a step"
    figures = [bar_figure(title, legend(parts), _memory(kinds, cost.time))]
    if any(stage.communication for _, stage in kinds):
        figures.append(_traffic(kinds))
    if (time := cost.time) is not None:
        title = f"Estimated step time on {time.device}"
        figures.append(bar_figure(title, legend([*time.parts]), [_time(time)], _speed(time)))
    notes = [element("li", note) for note in cost.notes or ()]
    return join(
        [
            element("div", *figures, class_="bars"),
            element("ul", *notes, class_="note") if notes else None,
            _tables(kinds, cost),
        ]
    )


def _kinds(stages: Sequence[StageCost]) -> Iterator[_Stage]:
    """Merge adjacent stages with equal estimates: ("1 to 6", estimate of each)."""

    def estimate(stage: StageCost) -> StageCost:
        return attrs.evolve(stage, pp=0, memory=attrs.evolve(stage.memory, moment=""))

    first = 0
    for i, stage in enumerate(stages):
        if i + 1 < len(stages) and estimate(stages[i + 1]) == estimate(stage):
            continue
        name = str(stage.pp) if first == i else f"{stages[first].pp} to {stage.pp}"
        yield name, stages[first]
        first = i + 1


def _memory(kinds: Sequence[_Stage], time: ExpectedTime | None) -> list[Bar]:
    bars = []
    for name, stage in kinds[:_STAGES]:
        memory = stage.memory
        parts = [
            (i, nbytes, f"{part}: {size(nbytes)}")
            for i, (part, nbytes) in enumerate(memory.parts.items())
        ]
        over = time is not None and memory.peak > time.memory_bytes
        bars.append(Bar(f"pp {name}", parts, size(memory.peak) + (", too much" if over else "")))
    return bars


def _sent(kinds: Sequence[_Stage]) -> tuple[str, dict[str, dict[str, tuple[float, float]]]]:
    """The stage with the largest communication volume, and group -> operation -> bytes, calls."""
    name, stage = max(kinds, key=lambda kind: sum(c.sent_bytes for c in kind[1].communication))
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for collective in stage.communication:
        of = groups.setdefault(f"{collective.group}, {collective.group_size} ranks", {})
        sent, calls = of.get(collective.operation, (0.0, 0.0))
        of[collective.operation] = (sent + collective.sent_bytes, calls + collective.calls)
    return name, groups


def _traffic(kinds: Sequence[_Stage]) -> Markup:
    """One row per group, one segment per operation."""
    name, groups = _sent(kinds)
    operations = list(dict.fromkeys(o for of in groups.values() for o in of))
    bars = []
    for group, of in groups.items():
        parts = [
            (operations.index(operation), sent, f"{operation}: {_calls(calls)}, {size(sent)}")
            for operation, (sent, calls) in of.items()
        ]
        total, calls = (sum(column) for column in zip(*of.values(), strict=True))
        bars.append(Bar(group, parts, f"{size(total)}, {_calls(calls)}"))
    where = f" (pp {name}, the largest)" if len(kinds) > 1 else ""
    title = f"Communication volume of one rank in a step{where}"
    return bar_figure(title, legend(operations), bars)


def _calls(calls: float) -> str:
    return f"{calls:,.0f} {'call' if calls == 1 else 'calls'}"


def _time(time: ExpectedTime) -> Bar:
    parts = [
        (i, part, f"{label}: {seconds(part)}") for i, (label, part) in enumerate(time.parts.items())
    ]
    return Bar("one step", parts, seconds(time.step))


def _speed(time: ExpectedTime) -> str:
    fits = "" if time.fits else f"; it does not fit in {size(time.memory_bytes)} of memory"
    return f"{time.tokens_per_second:,.0f} tokens/s, {time.mfu:.1%} of the peak{fits}"


def _tables(kinds: Sequence[_Stage], cost: Cost) -> Markup:
    parts = kinds[0][1].memory.parts
    memory = [
        [
            f"pp {name}",
            *(size(nbytes) for nbytes in (*stage.memory.parts.values(), stage.memory.peak)),
            stage.memory.moment,
        ]
        for name, stage in kinds
    ]
    work = [
        [f"pp {name}", f"{stage.parameters:,}", flops(stage.flops), flops(stage.model_flops)]
        for name, stage in kinds
    ]
    communication = [
        [f"pp {name}", c.group, c.operation, f"{c.calls:,}", size(c.sent_bytes), c.why]
        for name, stage in kinds
        for c in stage.communication
    ]
    groups = [[of.group, f"{of.buffer_mb} MiB", of.why] for of in cost.groups or ()]
    return details(
        "The data as tables, with parameters and FLOPs",
        table(("stage", *parts, "peak", "moment of the peak"), memory),
        table(("stage", "parameters", "hardware FLOPs", "model FLOPs"), work),
        table(("stage", "group", "operation", "calls", "sent", "why"), communication),
        *([table(("group", "buffer of hccl", "for"), groups)] if groups else []),
    )
