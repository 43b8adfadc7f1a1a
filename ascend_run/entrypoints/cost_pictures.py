"""What a run is expected to cost, as bars: memory a stage, communication a group, time a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from .plan_costs import flops, seconds, size
from .report.markup import Markup, details, element, join, table

_PARTS: Final = ("weights", "gradients", "optimizer", "activations", "buffers")
_TIMES: Final = ("products", "memory", "operations", "messages", "bubble")
_WIDTH: Final = 1000
_NAME: Final = 150
"""Of the names at the left, and below of the values at the right."""
_VALUE: Final = 130
_ROW: Final = 30
_STAGES: Final = 24


@attrs.frozen
class Bar:
    """One row: a name, its parts one after the other, and what they come to."""

    name: str
    parts: Sequence[tuple[int, float, str]]
    """Colour, length, and what it says when pointed at."""
    value: str


def cost_section(cost: Mapping[str, Any]) -> Markup:
    """All pictures, with the figures as tables."""
    kinds = list(_kinds(cost["stages"]))
    figures = [
        _figure("Memory of one rank, at the peak of a step", _legend(_PARTS), _memory(kinds, cost))
    ]
    if any(stage["messages"] for _, stage in kinds):
        figures.append(_traffic(kinds))
    if "time" in cost:
        time = cost["time"]
        title = f"Expected step on {time['device']}"
        figures.append(_figure(title, _legend(_TIMES), [_time(time)], _speed(time)))
    return join([element("div", *figures, class_="bars"), _tables(kinds)])


def _kinds(stages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Neighbouring stages that expect the same, as one: ("1 to 6", what each expects)."""

    def expected(stage: Mapping[str, Any]) -> dict[str, Any]:
        return {**stage, "pp": None, "memory": {**stage["memory"], "moment": None}}

    first = 0
    for i, stage in enumerate(stages):
        if i + 1 < len(stages) and expected(stages[i + 1]) == expected(stage):
            continue
        name = str(stage["pp"]) if first == i else f"{stages[first]['pp']} to {stage['pp']}"
        yield name, stages[first]
        first = i + 1


def _memory(kinds: Sequence[tuple[str, Mapping[str, Any]]], cost: Mapping[str, Any]) -> list[Bar]:
    limit = cost.get("time", {}).get("memory_bytes")
    bars = []
    for name, stage in kinds[:_STAGES]:
        memory = stage["memory"]
        parts = [
            (i, memory[part], f"{part}: {size(memory[part])}") for i, part in enumerate(_PARTS)
        ]
        over = limit is not None and memory["peak"] > limit
        bars.append(Bar(f"pp {name}", parts, size(memory["peak"]) + (", too much" if over else "")))
    return bars


def _sent(
    kinds: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[str, dict[str, dict[str, tuple[float, float]]]]:
    """Of the stage of those that sends most: its name, and group -> operation -> bytes, calls."""
    name, stage = max(kinds, key=lambda kind: sum(m["sent_bytes"] for m in kind[1]["messages"]))
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for message in stage["messages"]:
        of = groups.setdefault(f"{message['group']}, {message['group_size']} ranks", {})
        sent, calls = of.get(message["operation"], (0.0, 0.0))
        of[message["operation"]] = (sent + message["sent_bytes"], calls + message["calls"])
    return name, groups


def _traffic(kinds: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
    """A row a group, a part an operation."""
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
    where = f" (pp {name}, which sends most)" if len(kinds) > 1 else ""
    return _figure(f"Bytes that one rank sends in a step{where}", _legend(operations), bars)


def _calls(calls: float) -> str:
    return f"{calls:,.0f} {'call' if calls == 1 else 'calls'}"


def _time(time: Mapping[str, Any]) -> Bar:
    parts = [(i, time[name], f"{name}: {seconds(time[name])}") for i, name in enumerate(_TIMES)]
    return Bar("one step", parts, seconds(time["step"]))


def _speed(time: Mapping[str, Any]) -> str:
    fits = "" if time["fits"] else f"; it does not fit in {size(time['memory_bytes'])} of memory"
    return f"{time['tokens_per_second']:,.0f} tokens/s, {time['mfu']:.1%} of the peak{fits}"


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
    for colour, length, told in bar.parts:
        width = length * scale
        if width > 0:
            yield element(
                "rect",
                element("title", told),
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


def _tables(kinds: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
    memory = [
        [
            f"pp {name}",
            *(size(stage["memory"][p]) for p in (*_PARTS, "peak")),
            stage["memory"]["moment"],
        ]
        for name, stage in kinds
    ]
    work = [
        [
            f"pp {name}",
            f"{stage['parameters']:,}",
            flops(stage["flops"]),
            flops(stage["model_flops"]),
        ]
        for name, stage in kinds
    ]
    messages = [
        [
            f"pp {name}",
            m["group"],
            m["operation"],
            f"{m['calls']:,}",
            size(m["sent_bytes"]),
            m["why"],
        ]
        for name, stage in kinds
        for m in stage["messages"]
    ]
    return details(
        "The same as tables, with parameters and FLOPs",
        table(("stage", *_PARTS, "peak", "moment of the peak"), memory),
        table(("stage", "parameters", "FLOPs computed", "of the model"), work),
        table(("stage", "group", "operation", "calls", "sent", "why"), messages),
    )
