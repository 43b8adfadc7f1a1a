"""Pre-tokenization patterns of the tokenizers library, as patterns of Python's ``re``.

``re`` knows no ``\\p{...}`` and has another ``\\s``, so both become ranges of characters, which
are found with the library itself. A pattern with a construct that the two may read differently is
not translated.
"""

from __future__ import annotations

import functools
import re
from typing import Final

import attrs

_PART: Final = re.compile(
    r"""
    (?P<property> \\p\{ [LMNPSZ][a-z]? \} | \\s )
  | (?P<negated>  \\S )
  | (?P<literal>  \\[rnt] | \\[^\w\s] | [^\\\[\](){}|?*+.^$&~] )
  | (?P<bracket>  \[\^? | \] )
  | (?P<syntax>   \(\?(?:[:!=]|i:) | \) | \| | [?*+] | \{\d+(?:,\d*)?\}(?![?*+]) )
    """,
    re.VERBOSE,
)
_ASCII_END: Final = 0x80
_BMP_END: Final = 0x10000
_END: Final = 0x20000
"""The properties of what lies beyond are not looked up."""
_BEYOND_BMP: Final = re.compile("[\U00010000-\U0010ffff]")


@attrs.frozen
class SplitPattern:
    """Splits a text into the pre-tokens that the tokenizers library finds by a pattern."""

    pattern: str
    """Oniguruma's, as in tokenizer.json."""

    def is_supported(self) -> bool:
        """Return whether the pattern can be translated."""
        return _compiled(self.pattern, _ASCII_END) is not None

    def split(self, text: str) -> list[str] | None:
        """Return the pre-tokens in order; None for a text that only the library can split.

        That is one with letters of scripts beyond the basic multilingual plane, or one of which the
        pattern does not match all.
        """
        end = _ASCII_END if text.isascii() else _BMP_END
        if end == _BMP_END and (rare := {*_BEYOND_BMP.findall(text)}):
            properties = _rare_characters(self.pattern)
            if any(ord(character) >= _END or properties.search(character) for character in rare):
                return None
        compiled = _compiled(self.pattern, end)
        assert compiled is not None
        found: list[str] = compiled.findall(text)
        return found if sum(map(len, found)) == len(text) else None


@functools.cache
def _compiled(pattern: str, end: int) -> re.Pattern[str] | None:
    """Return the pattern for texts of characters below ``end``; None if it is not translated."""
    translated: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:
            return None
        at, text = part.end(), part.group()
        match part.lastgroup:
            case "property":
                members = _class(text, end)
                translated.append(members if in_class else f"[{members}]")
            case "negated" if not in_class:
                translated.append(f"[^{_class(text.lower(), end)}]")
            case "bracket" if in_class == (text == "]"):
                in_class = not in_class
                translated.append(text)
            case "syntax" if in_class and len(text) == 1:
                translated.append(re.escape(text))
            case "syntax" if not in_class:
                translated.append(text)
            case "literal":
                translated.append(text)
            case _:
                return None
    try:
        return re.compile("".join(translated))
    except re.error:
        return None


@functools.cache
def _rare_characters(pattern: str) -> re.Pattern[str]:
    """Return what matches characters from ``_BMP_END`` on with a property that a pattern names."""
    names = {part.group() for part in re.finditer(r"\\p\{\w+\}", pattern)}
    members = "".join(_class(name, _END, _BMP_END) for name in sorted(names))
    return re.compile(f"[{members}]" if members else "(?!)")


def _class(name: str, end: int, begin: int = 0) -> str:
    """Return the inside of a character class with the members from ``begin`` up to ``end``."""
    return "".join(
        f"\\U{max(first, begin):08x}-\\U{min(last, end - 1):08x}"
        for first, last in _ranges(name, end if end <= _ASCII_END else _END)
        if first < end and last >= begin
    )


@functools.cache
def _ranges(name: str, end: int) -> tuple[tuple[int, int], ...]:
    """Return the first and the last of each run of characters below ``end`` with a property."""
    from tokenizers import Regex, pre_tokenizers

    runs = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True)
    characters = "".join(chr(n) for n in range(end) if not 0xD800 <= n < 0xE000)
    return tuple((ord(run[0]), ord(run[-1])) for run, _ in runs.pre_tokenize_str(characters))
