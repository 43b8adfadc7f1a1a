"""Stacked areas over the time of a step, drawn as SVG; the phases of the step are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from .markup import Markup, element

_WIDTH, _HEIGHT = 1000, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 10, 26, 24
_LETTER: Final = 6.6
"""Width of a letter of the smallest text."""
_TICKS: Final = 4


class Sample(NamedTuple):
    """What is there at one moment, and from then on."""

    seconds: float
    phase: str
    values: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.values)


def area_drawing(
    title: str, names: Sequence[str], samples: Sequence[Sample], text: Callable[[float], str]
) -> Markup:
    """Draw samples as stacked steps.

    Args:
        names: Of the values, the lowest area first.
        samples: By time; at least one.
        text: Formats a value.
    """
    first, last = samples[0].seconds, samples[-1].seconds
    top = max(sample.total for sample in samples) or 1.0
    across = (_WIDTH - _LEFT - _RIGHT) / (last - first or 1.0)
    up = (_HEIGHT - _TOP - _BOTTOM) / top

    def x(seconds: float) -> float:
        return _LEFT + (seconds - first) * across

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value * up

    return element(
        "svg",
        *_axes(first, last, top, x, y, text),
        *_areas(names, samples, x, y),
        *_phases(samples, x),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=title,
        class_="areas-drawn",
    )


def _areas(
    names: Sequence[str],
    samples: Sequence[Sample],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> Iterator[Markup]:
    floor = [0.0] * len(samples)
    for i, name in enumerate(names):
        roof = [below + sample.values[i] for below, sample in zip(floor, samples, strict=True)]
        if roof != floor:
            forth = _staircase(samples, roof, x, y)
            back = reversed([*_staircase(samples, floor, x, y)])
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (*forth, *back))
            tooltip = element("title", name)
            yield element("polygon", tooltip, points=points, class_=f"c{i % 6}")
        floor = roof


def _staircase(
    samples: Sequence[Sample],
    heights: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> Iterator[tuple[float, float]]:
    before = heights[0]
    for sample, height in zip(samples, heights, strict=True):
        yield x(sample.seconds), y(before)
        if height != before:
            yield x(sample.seconds), y(height)
        before = height


def _phases(samples: Sequence[Sample], x: Callable[[float], float]) -> Iterator[Markup]:
    for phase, within in groupby(samples, key=lambda sample: sample.phase):
        times = [x(sample.seconds) for sample in within]
        left, width = times[0], times[-1] - times[0]
        yield element(
            "rect",
            element("title", phase),
            x=f"{left:.1f}",
            y=0,
            width=f"{max(width, 0.5):.1f}",
            height=_TOP - 8,
            class_="phase",
        )
        yield element(
            "line", x1=f"{left:.1f}", x2=f"{left:.1f}", y1=0, y2=_HEIGHT - _BOTTOM, class_="phase"
        )
        if width > len(phase) * _LETTER:
            yield element("text", phase, x=f"{left + width / 2:.1f}", y=13, text_anchor="middle")


def _axes(
    first: float,
    last: float,
    top: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
    text: Callable[[float], str],
) -> Iterator[Markup]:
    for value in (top * i / _TICKS for i in range(_TICKS + 1)):
        height = f"{y(value):.1f}"
        yield element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=height, y2=height, class_="tick")
        label = f"{y(value) + 4:.1f}"
        yield element("text", text(value), x=_LEFT - 8, y=label, text_anchor="end")
    for i in range(_TICKS + 1):
        seconds = first + (last - first) * i / _TICKS
        anchor = "end" if i == _TICKS else "middle"
        label = f"{seconds:.3g} s"
        yield element("text", label, x=f"{x(seconds):.1f}", y=_HEIGHT - 6, text_anchor=anchor)
