"""Horizontal bars of segments, drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from .markup import Markup, element

_WIDTH: Final = 1000
_NAME: Final = 150
"""Width of the names at the left, in the widest default font of Linux (DejaVu Sans)."""
_VALUE: Final = 160
"""Width of the values at the right."""
_ROW: Final = 30
_COLOURS: Final = 7


@attrs.frozen
class Bar:
    """One row: a name, its segments, and their sum."""

    name: str
    parts: Sequence[tuple[int, float, str]]
    """Colour, length and tooltip of each segment."""
    value: str


def bar_figure(title: str, legend: Markup | None, bars: Sequence[Bar], note: str = "") -> Markup:
    """Return a figure of horizontal bars with a common scale."""
    return element(
        "figure",
        element("figcaption", element("h3", title)),
        legend,
        element("div", _drawn(title, bars), class_="scroll", tabindex=0),
        element("p", note, class_="note") if note else None,
    )


def legend(names: Sequence[str]) -> Markup:
    """Return the colours of the segments' names, in the order of the colours."""
    entries = [
        element("span", element("i", class_=f"key c{i % _COLOURS}"), name)
        for i, name in enumerate(names)
    ]
    return element("div", *entries, class_="legend of-bars")


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
                class_=f"c{colour % _COLOURS}",
            )
        left += width
    yield element("text", bar.value, x=f"{left + 8:.2f}", y=middle, class_="value")
