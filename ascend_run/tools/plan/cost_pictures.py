"""Bar charts of the estimated cost: memory per stage, communication per group, time per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import attrs

from ascend_run.tools.pages.markup import Markup, details, element, join, table

from .cost_records import Cost, ExpectedTime, StageCost
from .cost_text import flops, seconds, size

_Stage: TypeAlias = tuple[str, StageCost]
"""Numbers of the stages with this estimate, and the estimate."""
_WIDTH: Final = 1000
_NAME: Final = 150
"""Width of the names at the left, in the widest default font of Linux (DejaVu Sans)."""
_VALUE: Final = 160
"""Width of the values at the right."""
_ROW: Final = 30
_STAGES: Final = 24


@attrs.frozen
class Bar:
    """One row: a name, its segments, and their sum."""

    name: str
    parts: Sequence[tuple[int, float, str]]
    """Colour, length and tooltip of each segment."""
    value: str


def cost_section(cost: Cost) -> Markup:
    """Return all charts, and their data as tables."""
    kinds = list(_kinds(cost.stages))
    parts = [*cost.stages[0].memory.parts]
    title = "Memory of one rank, at the peak of a step"
    figures = [_figure(title, _legend(parts), _memory(kinds, cost.time))]
    if any(stage.communication for _, stage in kinds):
        figures.append(_traffic(kinds))
    if (time := cost.time) is not None:
        title = f"Estimated step time on {time.device}"
        figures.append(_figure(title, _legend([*time.parts]), [_time(time)], _speed(time)))
    return join([element("div", *figures, class_="bars"), _tables(kinds)])


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
    return _figure(title, _legend(operations), bars)


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


def _figure(title: str, legend: Markup | None, bars: Sequence[Bar], note: str = "") -> Markup:
    return element(
        "figure",
        element("figcaption", element("h3", title)),
        legend,
        element("div", _drawn(title, bars), class_="scroll", tabindex=0),
        element("p", note, class_="note") if note else None,
    )


def _drawn(title: str, bars: Sequence[Bar]) -> Markup:
    longest = max((sum(part[1] for part in bar.parts) for bar in bars), default=0) or 1
    scale = (_WIDTH - _NAME - _VALUE) / longest
    rows = [row for i, bar in enumerate(bars) for row in _row(bar, i * _ROW, scale)]
    return element(
        "svg",
        *rows,
        viewBox=f"0 0 {_WIDTH} {_ROW * len(bars)}",
        role="img",
        aria_label=f"{title}: " + "; ".join(f"{bar.name} {bar.value}" for bar in bars),
        class_="bars-drawn",
    )


def _row(bar: Bar, top: int, scale: float) -> Iterator[Markup]:
    middle = top + _ROW // 2 + 4
    yield element("text", bar.name, x=_NAME - 10, y=middle, text_anchor="end")
    left = float(_NAME)
    for colour, length, tooltip in bar.parts:
        width = length * scale
        if width > 0:
            yield element(
                "rect",
                element("title", tooltip),
                x=f"{left:.2f}",
                y=top + 5,
                width=f"{width:.2f}",
                height=_ROW - 10,
                class_=f"c{colour % 6}",
            )
        left += width
    yield element("text", bar.value, x=f"{left + 8:.2f}", y=middle, class_="value")


def _legend(names: Sequence[str]) -> Markup:
    entries = [
        element("span", element("i", class_=f"key c{i % 6}"), name) for i, name in enumerate(names)
    ]
    return element("div", *entries, class_="legend of-bars")


def _tables(kinds: Sequence[_Stage]) -> Markup:
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
    return details(
        "The data as tables, with parameters and FLOPs",
        table(("stage", *parts, "peak", "moment of the peak"), memory),
        table(("stage", "parameters", "hardware FLOPs", "model FLOPs"), work),
        table(("stage", "group", "operation", "calls", "sent", "why"), communication),
    )
