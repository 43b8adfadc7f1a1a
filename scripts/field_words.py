"""Find words that the field does not use, in prose; the table is ``scripts/field_words.toml``.

python -m scripts.field_words             # lists file, line, the words and the field's words
python -m scripts.field_words docs tests  # only there

Prose is Markdown without code, and the comments and strings of Python (of tests, the comments and
docstrings). Exits 1 if there is any.
"""

from __future__ import annotations

import functools
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import click

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = Path(__file__).with_suffix(".toml")
PATHS: Final = (
    "README.md",
    "CHANGELOG.md",
    "changelog",
    "docs",
    "examples",
    "ascend_run",
    "benchmarks",
    "scripts",
    "tests",
)
"""What is checked: pages, and Python of these folders."""
_CODE: Final = re.compile(r"^```.*?^```|(?<=\n\n)(?:    [^\n]*\n|\n(?=    ))+|`[^`]*`", re.M | re.S)


@attrs.frozen
class Words:
    """A pattern, and what to write."""

    pattern: re.Pattern[str]
    field: str


@attrs.frozen
class Finding:
    """An occurrence of a pattern."""

    path: Path
    line: int
    words: str
    field: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.words}'; the field says: {self.field}"


def read_table(path: Path = TABLE) -> tuple[Words, ...]:
    """The patterns; a space in one stands for any white space."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    spaced = {pattern.replace(" ", r"\s+"): field for pattern, field in rows.items()}
    return tuple(
        Words(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), field)
        for pattern, field in spaced.items()
    )


@functools.cache
def _any_of(table: tuple[Words, ...]) -> re.Pattern[str]:
    """One pattern that lower-case text with any of the words matches. It is several times as fast
    as each of them in turn, since neither case nor the ends of words are checked."""
    spelled = [words.pattern.pattern.removeprefix(r"\b").removesuffix(r"\b") for words in table]
    return re.compile("|".join(spelled).lower())


def prose_of_markdown(text: str) -> str:
    """Replace blocks and spans of code by spaces; positions stay the same."""
    return _CODE.sub(lambda match: _blank(match[0]), text)


def prose_of_python(text: str, *, messages: bool = True) -> str:
    """Replace everything but comments and strings by spaces; positions stay the same.

    Args:
        text: The source.
        messages: Keep all strings; False keeps only those that are documentation.
    """
    lines = text.splitlines(keepends=True)
    kept = [list(_blank(line)) for line in lines]
    starts_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_string = kind in ("STRING", "FSTRING_MIDDLE") and (messages or starts_line)
        if is_string or kind == "COMMENT":
            (first, start), (last, end) = token.start, token.end
            for number in range(first, last + 1):
                line = lines[number - 1]
                span = slice(start if number == first else 0, end if number == last else len(line))
                kept[number - 1][span] = line[span].replace("#", " ")
        if kind not in ("NL", "COMMENT"):
            starts_line = kind in ("NEWLINE", "INDENT", "DEDENT")
    return "".join("".join(line) for line in kept)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def findings(path: Path, table: Sequence[Words]) -> Iterator[Finding]:
    """Find every occurrence of a pattern.

    Args:
        path: A Markdown or Python file.
        table: The patterns.
    """
    text = path.read_text(encoding="utf-8")
    everything = text.replace("#", " ")  # most files have none of the words, and need no reading
    if not _any_of(tuple(table)).search(everything.lower()):
        return
    table = [words for words in table if words.pattern.search(everything)]
    if not table:
        return
    if path.suffix == ".py":  # the strings of tests quote the messages of other files
        prose = prose_of_python(text, messages="tests" not in path.parts)
    else:
        prose = prose_of_markdown(text)
    for words in table:
        for match in words.pattern.finditer(prose):
            line = prose.count("\n", 0, match.start()) + 1
            yield Finding(path, line, " ".join(match[0].split()), words.field)


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """The Markdown and Python files of these paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".md", ".py"):
                yield file


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True))
def command(paths: Sequence[Path]) -> None:
    """List words that the field does not use."""
    table = read_table()
    found = 0
    for file in files(paths or [ROOT / name for name in PATHS]):
        for finding in sorted(findings(file, table), key=lambda one: one.line):
            found += 1
            click.echo(finding)
    sys.exit(int(found > 0))


if __name__ == "__main__":
    command()
