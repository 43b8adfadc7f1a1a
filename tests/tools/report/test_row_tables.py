"""Tables from a file of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api import ReportPanel
from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.report.row_tables import RowTables, tables_figure, tables_of


def row(title: str, **values: Any) -> str:
    return json.dumps({"title": title, "values": values})


def shown(folder: Path, lines: list[str], name: str = "found.jsonl") -> list[RowTables]:
    (folder / "found.jsonl").write_text("\n".join(lines))
    run = RunData(name="run", path=folder)
    panel = ReportPanel(title="Found", metrics=(), table=name)
    return tables_of([attrs.evolve(run, plan=attrs.evolve(run.plan, panels=(panel,)))])


def test_rows_of_a_title_are_a_table_of_all_their_columns(tmp_path: Path) -> None:
    lines = [row("a", x=1, y="<text>"), row("b", z=2.00001), row("a", x=12345, w=None)]
    ((a, b),) = (panel.tables for panel in shown(tmp_path, lines))
    assert (a.title, a.columns) == ("a", ("x", "y", "w"))
    assert a.rows == (("1", "<text>", ""), ("12,345", "", ""))
    assert (b.columns, b.rows) == (("z",), (("2",),))


def test_the_figure_escapes_texts(tmp_path: Path) -> None:
    (panel,) = shown(tmp_path, [row("<i>", **{"<b>": "<u>"})])
    text = tables_figure(panel)
    assert all(f"&lt;{name}&gt;" in text for name in "ibu")
    assert not any(f"<{name}>" in text for name in "ibu")


def test_lines_that_are_not_rows_are_left_out(tmp_path: Path) -> None:
    bad = [
        "",
        "[]",
        '{"title": "a"',
        row("a"),
        '{"title": 1, "values": {"x": 1}}',
        '{"title": "a"}',
    ]
    assert shown(tmp_path, bad) == []
    (panel,) = shown(tmp_path, [*bad, row("a", x=1)])
    assert [table.rows for table in panel.tables] == [(("1",),)]


def test_tables_are_only_of_files_of_the_run_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "found.jsonl").write_text(row("a", x=1))
    assert len(shown(inside, [row("a", x=1)])) == 1
    assert shown(inside, [row("a", x=1)], "../found.jsonl") == []
    assert shown(inside, [row("a", x=1)], "missing.jsonl") == []
