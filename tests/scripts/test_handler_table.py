"""The page of data handlers is fresh, and shows every schema."""

from __future__ import annotations

from ascend_run.text.handlers.loading import handler_names
from scripts.handler_table import PAGE, handlers, schema, tables, with_tables


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m scripts.handler_table"


def test_every_handler_shows_its_schema() -> None:
    assert [handler.name for handler in handlers()] == handler_names()
    for handler in handlers():
        shown = schema(handler)
        assert shown in tables()
        for key in handler.keys:
            assert not key.required or f'"{key.default or key.name}"' in shown
