"""Panels of plugins that draw stacked areas from a file of the run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.log.json_values import number
from ascend_run.tools.pages.area_chart import Sample, area_drawing
from ascend_run.tools.pages.bar_chart import legend
from ascend_run.tools.pages.markup import Markup, details, element, table
from ascend_run.tools.pages.run_folder import RunData

from .headline import memory
from .panel_files import objects_of, panel_file

_STEPS: Final = 4
"""The last steps of a file are drawn."""
_SAMPLES: Final = 800
"""Of a step."""


@attrs.frozen(kw_only=True)
class Areas:
    """One step of a panel."""

    title: str
    unit: str
    names: tuple[str, ...]
    """The lowest area first."""
    samples: tuple[Sample, ...]

    def text(self, value: float) -> str:
        """Format a value in the panel's unit."""
        return memory(value) if self.unit == "bytes" else f"{value:.4g} {self.unit}".strip()


def areas_of(runs: Sequence[RunData]) -> list[Areas]:
    """Return the drawings of every run whose plan has such panels, the last steps of each."""
    return [
        attrs.evolve(areas, title=f"{areas.title}: {run.name}") if len(runs) > 1 else areas
        for run in runs
        for panel in run.plan.panels
        for path in panel_file(run, panel.areas)
        for areas in _of_file(path, panel.title, panel.unit)
    ]


def area_figure(areas: Areas) -> Markup:
    """Return a step as a figure, with the highest moment of each phase as a table."""
    samples = _reduced(areas.samples)
    highest = max(samples, key=lambda sample: sample.total)
    rows = [
        [phase, areas.text(at.total), *map(areas.text, at.values)] for phase, at in _peaks(samples)
    ]
    peak = f"highest in {highest.phase}: {areas.text(highest.total)}"
    return element(
        "figure",
        element("figcaption", element("h3", areas.title, " ", element("small", peak))),
        legend(areas.names),
        element(
            "div",
            area_drawing(f"{areas.title}: {peak}", areas.names, samples, areas.text),
            class_="scroll",
            tabindex=0,
        ),
        details(
            "The highest moment of each phase as a table",
            table(("phase", "all", *areas.names), rows),
        ),
        class_="wide",
    )


def _of_file(path: Path, title: str, unit: str) -> Iterator[Areas]:
    steps: dict[int, list[tuple[float, str, Mapping[str, float]]]] = {}
    for step, seconds, phase, values in _lines(path):
        found = steps.setdefault(step, [])
        if found and seconds < found[-1][0]:  # a later attempt has recorded it again
            found.clear()
        found.append((seconds, phase, values))
    for step in sorted(steps)[-_STEPS:]:
        names = tuple(dict.fromkeys(name for _, _, values in steps[step] for name in values))
        samples = tuple(
            Sample(seconds, phase, tuple(values.get(name, 0.0) for name in names))
            for seconds, phase, values in steps[step]
        )
        yield Areas(title=f"{title}: step {step}", unit=unit, names=names, samples=samples)


def _lines(path: Path) -> Iterator[tuple[int, float, str, Mapping[str, float]]]:
    """Yield the valid lines of a file."""
    for found in objects_of(path):
        if (valid := _valid(found)) is not None:
            yield valid


def _valid(line: Mapping[str, Any]) -> tuple[int, float, str, Mapping[str, float]] | None:
    step, seconds, phase = line.get("step"), number(line.get("seconds")), line.get("phase")
    given = line.get("values")
    if not isinstance(step, int) or seconds is None or not math.isfinite(seconds):
        return None
    if not isinstance(phase, str) or not isinstance(given, dict) or not given:
        return None
    values = {name: value for name, x in given.items() if (value := number(x)) is not None}
    if len(values) < len(given) or not all(0 <= x < math.inf for x in values.values()):
        return None
    return step, seconds, phase, values


def _reduced(samples: Sequence[Sample]) -> list[Sample]:
    """Return the borders of phases, and the highest of every few samples between them."""
    size = math.ceil(len(samples) / _SAMPLES)
    reduced: list[Sample] = []
    for _, within in groupby(samples, key=lambda sample: sample.phase):
        first, *others = within
        between, last = others[:-1], others[-1:]
        parts = [between[i : i + size] for i in range(0, len(between), size)]
        highest = (max(part, key=lambda sample: sample.total) for part in parts)
        reduced += [first, *highest, *last]
    return reduced


def _peaks(samples: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Return the sample with the highest sum of each phase, in the order of their first ones."""
    peaks: dict[str, Sample] = {}
    for sample in samples:
        if sample.phase not in peaks or sample.total > peaks[sample.phase].total:
            peaks[sample.phase] = sample
    return [*peaks.items()]
