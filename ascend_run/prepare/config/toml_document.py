"""Parse TOML to plain data with line numbers; tomllib parses, this module finds the lines."""

from __future__ import annotations

import re
import tomllib
from typing import Final

_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')"""
_DOTTED: Final = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*")
_HEADER: Final = re.compile(rf"\s*\[{_DOTTED.pattern}\]\s*(?:#.*)?")
_ASSIGNMENT: Final = re.compile(rf"{_DOTTED.pattern}=.*", re.DOTALL)


class TomlProblem(Exception):
    """A syntax error with its location."""


def parse_toml(text: str) -> tuple[dict[str, object], dict[tuple[str, ...], int]]:
    """Return the document's data, and a map from key paths to lines (from 1) where certain.

    Raises:
        TomlProblem: The text is not TOML.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TomlProblem(str(error)) from None
    except ValueError:  # int() rejects thousands of digits
        raise TomlProblem("a number with too many digits") from None
    return data, _lines(text)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Map key paths to lines that look like a header or an assignment.

    A line inside a multi-line string may look like one, too. Its path is then seen twice and left
    out, since the true line is unknown.
    """
    lines: dict[tuple[str, ...], int] = {}
    repeated: set[tuple[str, ...]] = set()
    header: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _HEADER.fullmatch(line):
            header = path = _split(match[1])
        elif match := _ASSIGNMENT.fullmatch(line):
            path = (*header, *_split(match[1]))
        else:
            continue
        if path in lines:
            repeated.add(path)
        lines[path] = number
    return {path: number for path, number in lines.items() if path not in repeated}


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(_KEY, dotted))
