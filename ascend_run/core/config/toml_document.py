"""TOML as plain data with lines; tomllib gives the data, this module finds the lines."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')"""
_DOTTED: Final = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*")
_HEADER: Final = re.compile(rf"\s*\[{_DOTTED.pattern}\]\s*(?:#.*)?")
_ASSIGNMENT: Final = re.compile(rf"{_DOTTED.pattern}=.*", re.DOTALL)


class TomlProblem(Exception):
    """What is wrong with a document, and where."""


def parse_toml(text: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """The document's data, and path of keys -> line, from 1, where it is certain.

    Raises:
        TomlProblem: It is not TOML.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TomlProblem(str(error)) from None
    except ValueError:  # int() refuses thousands of digits
        raise TomlProblem("a number with too many digits") from None
    return data, _lines(text)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Lines that look like a header or an assignment; a path seen twice is left out.

    A line inside a long string can look like either, but then the true one is seen as well, and
    which is which is not known.
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
