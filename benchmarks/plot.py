"""Plot the last full run: each row's result relative to its goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from .rows import Row

PLOT: Final = Path(__file__).parent.parent / "docs" / "images" / "benchmarks.svg"

_WIDTH, _LABELS, _VALUES, _LINE, _HEAD = 960, 350, 210, 26, 48
_RANGE: Final = 4.0
"""Bars end at this many times the goal, and at its inverse."""
_MET, _MISSED, _INK, _FAINT = "#2a78b8", "#d9722b", "#222222", "#bbbbbb"


def svg(rows: Sequence[Row]) -> str:
    """Draw one bar per row on a logarithmic axis, relative to the goal."""
    height = _HEAD + _LINE * len(rows) + 16
    middle = _position(1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        "<style>text {font: 12px sans-serif}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(middle, 18, "what was measured, as a multiple of what is asked", anchor="middle"),
    ]
    for tick in (0.25, 0.5, 1.0, 2.0, 4.0):
        x = _position(tick)
        shade = _INK if tick == 1.0 else _FAINT
        parts.append(f'<path d="M{x:.1f} {_HEAD - 6}V{height - 10}" stroke="{shade}"/>')
        parts.append(_text(x, _HEAD - 12, f"{tick:g}", anchor="middle"))
    for index, row in enumerate(rows):
        parts += _bar(row, _HEAD + _LINE * index)
    return "\n".join([*parts, "</svg>\n"])


def _bar(row: Row, top: int) -> list[str]:
    baseline = top + 17
    parts = [_text(_LABELS - 10, baseline, row.name, anchor="end")]
    parts.append(_text(_WIDTH - _VALUES + 10, baseline, f"{_measured(row)}  (goal {row.goal})"))
    margin = row.margin()
    if margin is None:
        return parts
    left, right = sorted((_position(1.0), _position(margin)))
    colour = _MET if row.met else _MISSED
    width = max(1.0, right - left)
    parts.append(
        f'<rect x="{left:.1f}" y="{top + 5}" width="{width:.1f}" height="16" fill="{colour}"/>'
    )
    return parts


def _measured(row: Row) -> str:
    if row.ours is None:
        return "not measured"
    return f"{row.ratio:g} x" if row.goal.startswith(">=") else f"{row.ours:g} {row.unit}"


def _position(margin: float) -> float:
    """x coordinate of a multiple of the goal."""
    low, high = _LABELS, _WIDTH - _VALUES
    share = (math.log(margin) / math.log(_RANGE) + 1) / 2 if margin > 0 else 0.0
    return low + (high - low) * min(1.0, max(0.0, share))


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
    )
