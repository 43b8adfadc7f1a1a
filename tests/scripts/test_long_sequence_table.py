"""The page says which context-parallel plugin fine-tunes on what."""

from __future__ import annotations

from scripts.long_sequence_table import BEGIN, END, KINDS, PAGE, plugins, table
from scripts.marked_pages import between


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == between(page, BEGIN, END, table()), "run python -m scripts.long_sequence_table"


def test_every_plugin_is_a_row() -> None:
    rows = [line for line in table().splitlines() if line.startswith("| [")]
    assert [row.split("]")[0].removeprefix("| [") for row in rows] == plugins()
    assert all(row.count(" | ") == len(KINDS) for row in rows)
