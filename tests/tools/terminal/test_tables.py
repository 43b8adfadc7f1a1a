from __future__ import annotations

from ascend_run.tools.terminal.tables import table


def test_columns_are_aligned_and_lines_have_no_trailing_space() -> None:
    assert [*table(("name", "x"), [("a", "1"), ("longer", "")])] == [
        "name    x",
        "------  -",
        "a       1",
        "longer",
    ]


def test_the_flexible_column_is_wrapped_to_the_terminal() -> None:
    row = ("a", "one two three four five six", "end")

    lines = [*table(("n", "words", "z"), [row], width=27, flexible=1)]

    assert lines[2:] == ["a  one two three four   end", "   five six"]
    assert max(map(len, lines)) <= 27


def test_nothing_is_wrapped_without_a_width() -> None:
    words = "word " * 60

    assert len([*table(("words",), [(words,)], flexible=0)]) == 3


def test_a_table_without_rows_is_its_header() -> None:
    assert [*table(("name",), [])] == ["name", "----"]
