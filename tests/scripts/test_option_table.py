"""The page of Megatron's options is fresh."""

from __future__ import annotations

from scripts.option_table import PAGE, page


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.option_table"
