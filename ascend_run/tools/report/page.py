"""Assemble the page: one file that needs no network and no other file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run import __version__
from ascend_run.core.files import replace_file
from ascend_run.plugin_api.errors import StorageError
from ascend_run.tools.pages.frame import document, section
from ascend_run.tools.pages.markup import Markup, element, join
from ascend_run.tools.pages.plan_section import plan_section
from ascend_run.tools.pages.ranks_section import group_membership, ranks_section
from ascend_run.tools.pages.run_folder import RunData

from .areas import Areas, area_figure, areas_of
from .blend import blend_section
from .charts import Chart, Heat, charts_of, heats_of, payload
from .headline import comparison, headline
from .row_tables import RowTables, tables_figure, tables_of
from .series import LayerLoads
from .summary import Summary, summarize, utc
from .tables import (
    config_section,
    curve_table,
    difference_section,
    heat_table,
    layers_table,
    warnings_section,
)

_SHORT_CURVE: Final = 100
"""Curves with fewer points are not smoothed."""
SCRIPTS: Final = (
    "format.js",
    "scale.js",
    "plot.js",
    "line_chart.js",
    "heat_map.js",
    "layer_map.js",
    "page.js",
)


def write_report(runs: Sequence[RunData], target: Path) -> list[Summary]:
    """Write the page atomically.

    Args:
        runs: One run, or several to compare.
        target: File to write or replace.

    Returns:
        The key figures of each run.

    Raises:
        StorageError: The file cannot be written.
    """
    runs = _with_unique_names(runs)
    summaries = [summarize(run) for run in runs]
    text = render(runs, summaries, written=time.time())
    try:
        replace_file(target, text)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}",
            [f"{error.strerror or error}; choose another file with --output"],
        ) from error
    return summaries


def render(runs: Sequence[RunData], summaries: Sequence[Summary], *, written: float) -> str:
    """Return the page as text.

    Args:
        written: Unix time, for the footer.
    """
    charts, heats = charts_of(runs), heats_of(runs)
    several = len(runs) > 1
    top = comparison(runs, summaries) if several else headline(runs[0], summaries[0])
    sections = [
        _problems(runs),
        _curves(runs, charts, heats, areas_of(runs), tables_of(runs)),
        *_blends(runs, summaries),
        *_plan(runs),
        *_configuration(runs),
    ]
    return document(
        title=f"{', '.join(run.name for run in runs)} \N{MIDDLE DOT} ascend-run report",
        brand="ascend-run report",
        top=top,
        sections=sections,
        foot=_foot(runs, summaries, written),
        data=payload(runs, charts, heats) | {"groups": [group_membership(run) for run in runs]},
        scripts=SCRIPTS,
    )


def _with_unique_names(runs: Sequence[RunData]) -> Sequence[RunData]:
    """Use the paths as names for folders with the same name."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [attrs.evolve(run, name=str(run.path)) for run in runs]


def _problems(runs: Sequence[RunData]) -> Markup | None:
    lines = [
        element("li", f"{run.name}: {problem}" if len(runs) > 1 else problem)
        for run in runs
        for problem in run.problems
    ]
    if not lines:
        return None
    return section("missing", "Missing from this page", element("ul", *lines))


def _curves(
    runs: Sequence[RunData],
    charts: Sequence[Chart],
    heats: Sequence[Heat],
    areas: Sequence[Areas],
    tables: Sequence[RowTables],
) -> Markup:
    if not charts:
        return section("curves", "Curves", element("p", "No metrics have been logged yet."))
    names = [run.name for run in runs]
    narrow = [chart for chart in charts if not chart.curve.main]
    alone = narrow[-1] if len(narrow) % 2 else None  # in the last row of two
    plots = [_figure(chart, names, wide=chart is alone) for chart in charts]
    for heat in heats:
        plots.append(_heat_figure(heat, several=len(runs) > 1))
        if heat.layers is not None:
            plots.append(_layers_figure(heat, heat.layers, several=len(runs) > 1))
    plots += map(area_figure, areas)
    plots += map(tables_figure, tables)
    return section(
        "curves",
        "Curves",
        _toolbar(charts),
        element("div", *plots, class_="charts"),
        element("p", class_="visually-hidden", id="readout", aria_live="polite"),
    )


def _toolbar(charts: Sequence[Chart]) -> Markup:
    points = max(len(line.series.steps) for chart in charts for line in chart.lines)
    smoothing = 60 if points > _SHORT_CURVE else 0
    slider = element("input", type="range", id="smoothing", min=0, max=99, value=smoothing, step=1)
    return element(
        "div",
        element("label", "Smoothing ", slider, " ", element("output", id="smoothing-value")),
        element("button", "Whole run", type="button", id="zoom-out", disabled=True),
        element(
            "span",
            "Drag across a curve to zoom in; arrow keys move the cursor of a focused curve.",
            class_="hint",
        ),
        class_="toolbar needs-script",
    )


def _figure(chart: Chart, names: Sequence[str], *, wide: bool) -> Markup:
    unit = element("small", chart.curve.unit) if chart.curve.unit else None
    log = element("button", "log", type="button", class_="log needs-script", aria_pressed="false")
    return element(
        "figure",
        element("figcaption", element("h3", chart.curve.title, " ", unit), log),
        element("div", class_="plot", data_chart=chart.curve.id),
        element("p", chart.note, class_="note") if chart.note else None,
        curve_table(chart, names),
        class_="wide main" if chart.curve.main else "wide" if wide else None,
    )


def _heat_figure(heat: Heat, *, several: bool) -> Markup:
    title = f"Expert load: {heat.name}" if several else "Expert load"
    unit = element("small", "share of the tokens, relative to balance")
    many = heat.load.readings_per_column
    note = f"Each column is the mean of {many} readings." if many > 1 else None
    return element(
        "figure",
        element("figcaption", element("h3", title, " ", unit)),
        element("div", class_="plot heat", data_heat=f"load-{heat.run}"),
        element("p", note, class_="note") if note else None,
        heat_table(heat),
        class_="wide",
    )


def _layers_figure(heat: Heat, loads: LayerLoads, *, several: bool) -> Markup:
    title = f"Expert load by layer: {heat.name}" if several else "Expert load by layer"
    unit = element("small", "share of the layer's tokens, relative to balance")
    return element(
        "figure",
        element("figcaption", element("h3", title, " ", unit)),
        element("div", class_="plot heat", data_layers=f"load-{heat.run}"),
        element("p", "At the step of the cursor in the other plots; else the last.", class_="note"),
        layers_table(loads),
        class_="wide",
    )


def _blends(runs: Sequence[RunData], summaries: Sequence[Summary]) -> list[Markup]:
    return [
        section(
            f"blend-{i}",
            f"Training data: {run.name}" if len(runs) > 1 else "Training data",
            blend_section(summary.blend),
        )
        for i, (run, summary) in enumerate(zip(runs, summaries, strict=True))
        if summary.blend
    ]


def _plan(runs: Sequence[RunData]) -> list[Markup]:
    parts = []
    for i, run in enumerate(runs):
        suffix = f": {run.name}" if len(runs) > 1 else ""
        if (plan := plan_section(run)) is not None:
            parts.append(section(f"plan-{i}", f"The plan{suffix}", plan))
        if (ranks := ranks_section(run)) is not None:
            grid = element("div", ranks, data_run=i)
            parts.append(section(f"ranks-{i}", f"Ranks{suffix}", grid))
    return parts


def _configuration(runs: Sequence[RunData]) -> list[Markup]:
    parts = []
    if len(runs) > 1:
        parts.append(section("differences", "Where the runs differ", difference_section(runs)))
    for i, run in enumerate(runs):
        suffix = f": {run.name}" if len(runs) > 1 else ""
        if (config := config_section(run)) is not None:
            parts.append(section(f"config-{i}", f"Configuration{suffix}", config))
        parts.append(section(f"warnings-{i}", f"Warnings{suffix}", warnings_section(run)))
    return parts


def _foot(runs: Sequence[RunData], summaries: Sequence[Summary], written: float) -> Markup:
    lines = [f"Written {utc(written)} by ascend-run {__version__}."]
    for run, summary in zip(runs, summaries, strict=True):
        last = f"; last reading {summary.last_written}" if summary.last_written else ""
        lines.append(f"{run.name}: {run.path}{last}.")
    return join(element("p", line) for line in lines)
