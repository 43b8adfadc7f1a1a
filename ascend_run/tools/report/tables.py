"""Tables of the configuration, of warnings, and of the values of a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ascend_run.tools.pages.markup import Markup, details, element, join, table
from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.pages.run_records import LogEvent

from .charts import Chart, Heat, Line
from .series import LayerLoads
from .summary import utc

_ROWS_OF_CURVE: Final = 25
_WARNINGS: Final = 300


def config_section(run: RunData) -> Markup | None:
    """Return a searchable table of all keys with values and origins; None without a config."""
    if not run.config_rows:
        return None
    rows = [
        element(
            "tr",
            element("th", element("code", row.name), scope="row"),
            element("td", element("code", row.value)),
            element("td", row.origin or "not recorded"),
            data_set="yes" if row.is_set else "no",
        )
        for row in run.config_rows
    ]
    head = element("tr", *(element("th", t, scope="col") for t in ("key", "value", "origin")))
    search = element(
        "label", "Search ", element("input", type="search", class_="config-search", size=28)
    )
    only_set = element(
        "label", element("input", type="checkbox", class_="config-set"), " only what was set"
    )
    count = element("span", f"{len(rows)} keys", class_="config-count", aria_live="polite")
    body = element("table", element("thead", head), element("tbody", *rows), class_="config")
    return join(
        [
            element("div", search, only_set, count, class_="buttons needs-script"),
            element("div", body, class_="scroll tall", tabindex=0),
        ]
    )


def difference_section(runs: Sequence[RunData]) -> Markup:
    """Return a table of the keys whose values differ between the runs."""
    values = [{row.name: row.value for row in run.config_rows} for run in runs]
    names = dict.fromkeys(name for value in values for name in value)
    different = [n for n in names if len({value.get(n) for value in values}) > 1]
    if not different:
        return element("p", "The configurations are the same.")
    rows = [[element("code", n), *(_code(value.get(n)) for value in values)] for n in different]
    return table(("key", *(run.name for run in runs)), rows)


def warnings_section(run: RunData) -> Markup:
    """Return the warnings and errors of the log, newest last."""
    if not run.warnings:
        return element("p", "No warning was logged.")
    rows = [
        [_time(event), event.rank, event.level, _event(event)] for event in run.warnings[:_WARNINGS]
    ]
    more = len(run.warnings) - _WARNINGS
    return join(
        [
            table(("time", "rank", "level", "event"), rows),
            element("p", f"and {more:,} more in log.jsonl", class_="note") if more > 0 else None,
        ]
    )


def curve_table(chart: Chart, names: Sequence[str]) -> Markup:
    """Return some values of each curve, for screen readers and browsers without scripts."""
    parts = []
    for line in chart.lines:
        steps = _spread(len(line.series.steps))
        rows = [[f"{line.series.steps[i]:,}", _figure(line, i)] for i in steps]
        unit = f" ({chart.curve.unit})" if chart.curve.unit else ""
        title = f"{names[line.run]}: {line.label}" if len(names) > 1 else line.label
        parts.append(table(("step", title + unit), rows))
    return details("Values as a table", element("div", *parts, class_="side-by-side"))


def heat_table(heat: Heat) -> Markup:
    """Share of each expert at some steps."""
    experts = range(len(heat.load.shares[-1]))
    rows = [
        [f"{heat.load.edges[i]:,}", *(f"{100 * share:.1f} %" for share in heat.load.shares[i])]
        for i in _spread(len(heat.load.shares))
    ]
    head = ("step", *(f"expert {i}" for i in experts))
    return details("Values as a table", table(head, rows))


def layers_table(loads: LayerLoads) -> Markup:
    """Fullest expert of each layer at some steps."""
    rows = []
    for i in _spread(len(loads.shares)):
        fullest = [max(range(len(layer)), key=layer.__getitem__) for layer in loads.shares[i]]
        cells = [
            f"expert {expert}: {100 * layer[expert]:.1f} %"
            for expert, layer in zip(fullest, loads.shares[i], strict=True)
        ]
        rows.append([f"{loads.edges[i]:,}", *cells])
    head = ("step", *(f"layer {layer}" for layer in loads.layers))
    return details("Fullest experts as a table", table(head, rows))


def _spread(count: int) -> list[int]:
    """Evenly spread indices, including the first and the last."""
    if count <= _ROWS_OF_CURVE:
        return list(range(count))
    return [round(i * (count - 1) / (_ROWS_OF_CURVE - 1)) for i in range(_ROWS_OF_CURVE)]


def _figure(line: Line, i: int) -> str:
    value = line.series.values[i]
    return "not finite" if value is None else f"{value:,.6g}"


def _code(value: str | None) -> Markup:
    return element("code", value) if value is not None else element("i", "not there")


def _time(event: LogEvent) -> str:
    try:
        return "" if event.time is None else utc(event.time)
    except (OverflowError, OSError, ValueError):
        return ""  # outside the range of datetime


def _event(event: LogEvent) -> Markup:
    fields = "  ".join(f"{key}={value}" for key, value in event.fields.items())
    trace = event.exception
    return join(
        [
            element("b", event.event),
            " ",
            fields,
            details("traceback", element("pre", trace)) if trace else None,
        ]
    )
