"""Read JSON lines, and JSON arrays of objects element by element; ``.gz`` too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from .problems import Problems
from .unicode_text import lone_surrogate, wrong_byte

_CHUNK: Final = 2**20
"""Characters read at a time."""
_CUT: Final = 16
"""An error this near to the end of what was read may be a value that is cut there."""

_LARGE: Final = "has an integer that is too large to read; write it as a string"
"""Python limits the digits that it converts: their time is quadratic."""


def read_json_lines(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each line that is not blank."""
    with _open(path) as stream:
        yield from _lines(stream, problems)


def read_json(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of an array; a file that does not begin with one is JSON lines."""
    with _open(path) as stream:
        begin = stream.read(1)
        while begin.isspace():
            begin = stream.read(1)
        if begin == "[":
            yield from _elements(stream, problems)
            return
    yield from read_json_lines(path, problems)


def _open(path: Path) -> TextIO:
    """Open a file; bytes that are not UTF-8 become surrogates, so that their row can be named."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="surrogateescape")
    return path.open(encoding="utf-8-sig", errors="surrogateescape")


def _lines(stream: TextIO, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            value = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            where = f"not JSON: {error.msg} at column {error.colno}"
            problems.add(wrong_byte(line) or where, number)
        except RecursionError:
            problems.add("not JSON: nested too deeply", number)
        except ValueError:
            problems.add(_LARGE, number)
        else:
            yield from _object(value, line, number, problems)


def _object(
    value: Any, source: str, row: int, problems: Problems
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a parsed value; ``source`` is its text."""
    if not isinstance(value, dict):
        problems.add(f"expected a JSON object, found {type(value).__name__}", row)
    elif wrong := wrong_byte(source) or lone_surrogate(source, value):
        problems.add(wrong, row)
    else:
        yield row, value


class _Broken(Exception):
    """The text is no JSON array from here on."""


def _elements(stream: TextIO, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of an array whose ``[`` has been read; memory: one chunk or element."""
    reader = _Reader(stream)
    row = 0
    try:
        if reader.next_character("]") == "]":
            reader.end()
            return
        while True:
            row += 1
            yield from _object(*reader.value(), row, problems)
            if reader.next_character(",]", takes=True) == "]":
                reader.end()
                return
    except _Broken as error:
        problems.add(f"not a JSON array: {error}", row or 1)
    except RecursionError:
        problems.add("not JSON: nested too deeply", row)
    except ValueError:
        problems.add(f"{_LARGE}; nothing after it is read", row)


class _Reader:
    """Reads one value after another from a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text, self._at = stream, "", 0
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        chunk = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def next_character(self, expected: str, *, takes: bool = False) -> str:
        """Return what follows the spaces; with ``takes``, it must be expected and is passed."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                break
            if not self._more():
                raise _Broken("it ends before ']'")
        found = self._text[self._at]
        if takes and found not in expected:
            raise _Broken(f"expected ',' or ']', found {found!r}")
        self._at += takes
        return found

    def value(self) -> tuple[Any, str]:
        """Return the next value and its text."""
        self.next_character("")
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or (
                    error.pos >= len(self._text) - _CUT
                )
                if not (is_cut and self._more()):
                    raise _Broken(error.msg) from None
            else:
                source, self._at = self._text[self._at : end], end
                return value, source

    def end(self) -> None:
        """Check that nothing follows the array."""
        rest = self._text[self._at :].lstrip().removeprefix("]")
        if rest.strip() or self._stream.read(_CHUNK).strip():
            raise _Broken("text follows its ']'")
