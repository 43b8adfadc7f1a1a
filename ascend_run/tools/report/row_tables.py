"""Panels of plugins that show tables from a file of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ascend_run.tools.pages.markup import Markup, element, join, table
from ascend_run.tools.pages.run_folder import RunData

from .panel_files import objects_of, panel_file


@attrs.frozen(kw_only=True)
class RowTable:
    """Rows of one title; columns are in the order in which rows name them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@attrs.frozen(kw_only=True)
class RowTables:
    """One panel."""

    title: str
    tables: tuple[RowTable, ...]


def tables_of(runs: Sequence[RunData]) -> list[RowTables]:
    """Return the tables of every run whose plan has such panels and whose folder has their rows."""
    return [
        RowTables(
            title=f"{panel.title}: {run.name}" if len(runs) > 1 else panel.title, tables=tables
        )
        for run in runs
        for panel in run.plan.panels
        for path in panel_file(run, panel.table)
        if (tables := _of_file(path))
    ]


def tables_figure(found: RowTables) -> Markup:
    """Return a panel as a figure."""
    parts = [
        join([element("h4", each.title), table(each.columns, each.rows, class_="rows")])
        for each in found.tables
    ]
    return element(
        "figure",
        element("figcaption", element("h3", found.title)),
        *parts,
        class_="wide",
    )


def _of_file(path: Path) -> tuple[RowTable, ...]:
    given: dict[str, list[Mapping[str, Any]]] = {}
    for line in objects_of(path):
        title, values = line.get("title"), line.get("values")
        if isinstance(title, str) and isinstance(values, dict) and values:
            given.setdefault(title, []).append(values)
    return tuple(_table(title, rows) for title, rows in given.items())


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> RowTable:
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    cells = tuple(tuple(_text(row.get(name)) for name in columns) for row in rows)
    return RowTable(title=title, columns=columns, rows=cells)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
