"""Exposed communication as curves over the load of the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 420, 70, 40, 190, 50
_COLOURS: Final = ("#999999", "#d9722b", "#e8b07a", "#2a78b8", "#86b6dc", "#3a9a5b", "#8a5bb0")
_INK, _FAINT = "#222222", "#dddddd"
_LEAST, _MOST = 0.003, 30.0


def svg(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Of the network with the fastest nodes, without latency, a way out for each rank."""
    ratio = max(row["ratio"] for row in rows)
    shown = [r for r in rows if (r["ratio"], r["latency"], r["shared"]) == (ratio, 0.0, False)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        "<style>text {font: 12px sans-serif}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, f"exposed communication / computation; nodes {ratio:g} x as fast inside"),
    ]
    loads = [row["load"] for row in shown]
    for tick in (0.01, 0.1, 1.0, 10.0):
        y = _y(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_FAINT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", "end"))
    for load in loads:
        x = _x(load, loads)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_FAINT}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{load:g}", "middle"))
    axis = "a ring's messages between nodes / its computation"
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, axis, "middle"))
    for index, (name, colour) in enumerate(zip(names, _COLOURS, strict=True)):
        points = [
            (_x(row["load"], loads), _y(row["exposed"][name]))
            for row in shown
            if row["exposed"][name] > _LEAST
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 20 * index + 10
        x = _WIDTH - _RIGHT + 12
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(x + 24, y, name))
    return "\n".join([*parts, "</svg>\n"])


def _x(load: float, loads: Sequence[float]) -> float:
    share = math.log(load / loads[0]) / math.log(loads[-1] / loads[0])
    return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)


def _y(value: float) -> float:
    bounded = min(max(value, _LEAST), _MOST)
    share = math.log(bounded / _LEAST) / math.log(_MOST / _LEAST)
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
    )
