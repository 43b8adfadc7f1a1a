"""Encode texts to tokens with their places. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Final, TypeAlias

from .pretokens import PretokenEncoder

Placed: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Ids of a text, and the first character and the end of each, which do not decrease."""

_IDS: Final = itemgetter(0)


class Tokens:
    """The tokens of a text, with the range of characters of each.

    Args:
        parts: Its parts in order, each encoded alone.
        placed: The tokens of each part.
    """

    def __init__(self, text: str, parts: Sequence[str], placed: Sequence[Placed]) -> None:
        ids_of = [*map(_IDS, placed)]
        self.ids = [*chain.from_iterable(ids_of)]
        self._text, self._placed = text, placed
        self._starts = [*accumulate(map(len, parts), initial=0)]
        self._firsts = [*accumulate(map(len, ids_of), initial=0)]

    def inside(self, span: tuple[int, int]) -> range:
        """Return the indices of the tokens that have a character of the span."""
        part = bisect_right(self._starts, span[0]) - 1
        first = self._firsts[part]
        if part < len(self._placed):
            first += bisect_right(self._placed[part][2], span[0] - self._starts[part])
        part = bisect_left(self._starts, span[1]) - 1
        if part < 0:
            return range(0)
        begins = self._placed[part][1]
        return range(first, self._firsts[part] + bisect_left(begins, span[1] - self._starts[part]))

    def is_space(self, index: int) -> bool:
        """Whether a token has characters, and all are white space."""
        part = bisect_right(self._firsts, index) - 1
        start, (_, begins, ends) = self._starts[part], self._placed[part]
        at = index - self._firsts[part]
        return self._text[start + begins[at] : start + ends[at]].isspace()


class TokenEncoder:
    """Encodes texts in which special tokens are encoded as tokens.

    Args:
        backend: A tokenizers.Tokenizer.
        values: The content of its tokenizer.json.
    """

    def __init__(self, backend: Any, values: Mapping[str, Any]) -> None:
        self._encoder = PretokenEncoder[Placed](
            backend,
            values,
            special_as_text=False,
            encode=_placed,
            encode_added=lambda token: ([token["id"]], (0,), (len(token["content"]),)),
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without special tokens added."""
        encoded = zip(texts, self._encoder.encode(texts), strict=True)
        return [Tokens(text, parts, placed) for text, (parts, placed) in encoded]


def _placed(backend: Any, texts: Sequence[str]) -> list[Placed]:
    found: list[Placed] = []
    for encoding in backend.encode_batch([*texts], add_special_tokens=False):
        offsets = encoding.offsets
        begins, ends = zip(*offsets, strict=True) if offsets else ((), ())
        found.append((encoding.ids, begins, ends))
    return found
