"""The checker of words in prose."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.field_words import command, findings, read_table

TABLE = read_table()


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return [(finding.line, finding.words) for finding in findings(file, TABLE)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A run\nGoes on\nfrom it.\n", [(2, "Goes on from")]),
        ("See `goes on from`.\n", []),
        ("```\nwhoever\n```\nwhoever\n", [(4, "whoever")]),
        ("Text:\n\n    whoever\n\nNobody.\n", [(5, "Nobody")]),
        ("| whoever | nobody_knows |\n", [(1, "whoever")]),
    ],
)
def test_markdown_is_read_without_code(
    tmp_path: Path, text: str, expected: list[tuple[int, str]]
) -> None:
    assert found(tmp_path, "page.md", text) == expected


SOURCE = '''"""Held
against it."""
nobody = f("nobody")  # computed
# again
'''


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("code/module.py", [(1, "Held against"), (3, "computed again"), (3, "nobody")]),
        ("tests/module.py", [(1, "Held against"), (3, "computed again")]),
    ],
)
def test_python_is_read_by_comments_and_strings(
    tmp_path: Path, name: str, expected: list[tuple[int, str]]
) -> None:
    """Of tests without strings other than docstrings: they quote messages."""
    assert sorted(found(tmp_path, name, SOURCE)) == expected


def test_the_command_names_file_line_words_and_the_fields(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Fine.\nAn error is\ncomputed again.\n")
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert result.output == f"{page}:3: 'computed again'; the field says: recomputed\n"
    page.write_text("Fine.\n")
    assert CliRunner().invoke(command, [str(tmp_path)]).exit_code == 0
