"""The page of presets is fresh, and has a row for each."""

from __future__ import annotations

import pytest

from ascend_run.tools.preset.presets import presets
from scripts.preset_table import PAGE, table, with_table


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m scripts.preset_table"


def test_every_preset_has_a_row() -> None:
    rows = table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [*presets()]


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="presets:begin"):
        with_table("a page")
