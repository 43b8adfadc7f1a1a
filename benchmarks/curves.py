"""Draw curves as SVG, on two logarithmic axes or two linear ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import attrs

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 420, 70, 40, 190, 50
_INK, _FAINT = "#222222", "#dddddd"
COLOURS: Final[Mapping[str, str]] = {
    "ring without overlap": "#999999",
    "ring": "#d9722b",
    "ring, all kept": "#e8b07a",
    "double ring": "#2a78b8",
    "double ring, all kept": "#86b6dc",
    "hybrid": "#3a9a5b",
    "ulysses": "#8a5bb0",
    "kv all-gather": "#b03a4a",
    "kv all-gather, by heads": "#dd8a94",
    "dpo": "#2a78b8",
    "simpo": "#d9722b",
    "chosen-only": "#999999",
    "orm": "#3a9a5b",
}
"""Colour of each schedule or run, the same in every chart."""

Points = Sequence[tuple[float, float]]


@attrs.frozen(kw_only=True)
class Picture:
    """Title and axes of a chart."""

    title: str
    axis: str
    """Label of the horizontal axis."""
    x_ticks: Sequence[float]
    """The first and the last one are the ends of the axis."""
    y_ticks: Sequence[float]
    least: float
    most: float
    """Ends of the vertical axis; smaller values are not drawn, larger ones are clipped."""
    linear: bool = False
    """Whether the axes are linear instead of logarithmic."""

    def draw(self, curves: Mapping[str, Points]) -> str:
        """Draw labelled curves in the colours of their names."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
            "<style>text {font: 12px sans-serif}</style>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            _text(_LEFT, 20, self.title),
        ]
        for tick in self.y_ticks:
            y = self._y(tick)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_FAINT}"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", "end"))
        for tick in self.x_ticks:
            x = self._x(tick)
            parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_FAINT}"/>')
            parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{tick:g}", "middle"))
        parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, self.axis, "middle"))
        for index, (name, points) in enumerate(curves.items()):
            line = " ".join(
                f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points if y >= self.least
            )
            y, x = _TOP + 20 * index + 10, _WIDTH - _RIGHT + 12
            stroke = f'stroke="{COLOURS[name]}" stroke-width="2"'
            parts.append(f'<polyline points="{line}" fill="none" {stroke}/>')
            parts.append(f'<path d="M{x} {y - 4}h18" {stroke}/>')
            parts.append(_text(x + 24, y, name))
        return "\n".join([*parts, "</svg>\n"])

    def _x(self, value: float) -> float:
        share = self._share(value, self.x_ticks[0], self.x_ticks[-1])
        return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)

    def _y(self, value: float) -> float:
        bounded = min(max(value, self.least), self.most)
        share = self._share(bounded, self.least, self.most)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def _share(self, value: float, least: float, most: float) -> float:
        if self.linear:
            return (value - least) / (most - least)
        return math.log(value / least) / math.log(most / least)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
    )
