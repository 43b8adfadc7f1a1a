"""Encode as a byte-level tokenizer does, but each distinct pre-token once.

Such a tokenizer splits a text at its added tokens and the rest by a pattern, and encodes each
pre-token alone. A text has few distinct ones, so that looking them up takes a fraction of the
tokenizers library's time. Their ids and offsets are the library's, so the result is too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Generic, TypeVar

import attrs

from .split_pattern import SplitPattern

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the pre-tokenizer ByteLevel."""
_MOST_BYTES: Final = 2**28
"""Size of the cache, after which it is emptied."""
_ENTRY_BYTES: Final = 256
"""Size of a pre-token in the cache, and its tokens, beside its characters."""

V = TypeVar("V")
Values = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Splitter:
    """How a tokenizer splits a text into what it encodes alone."""

    pattern: SplitPattern
    normalizer: Any
    """A tokenizers.Normalizer; a text that it changes is not split here."""
    added: re.Pattern[str] | None
    """The added tokens, as one group."""
    hidden: re.Pattern[str] | None
    """A text with one of these tokens is not split here."""
    trims_spaces: bool
    """Whether the offsets of a token leave out its spaces."""
    trims_first_space: bool
    """If so, whether this also holds for the space that begins a text."""

    def split(self, text: str) -> list[str] | None:
        """Return the pre-tokens and added tokens in order; None: the library must encode it."""
        if (
            (self.hidden is not None and self.hidden.search(text))
            or (self.trims_spaces and not self.trims_first_space and text.startswith(" "))
            or not (
                self.normalizer is None
                or text.isascii()
                or self.normalizer.normalize_str(text) == text
            )
        ):
            return None
        if self.added is None:
            return self.pattern.split(text)
        found: list[str] = []
        for index, part in enumerate(self.added.split(text)):
            if index % 2:
                found.append(part)
            elif part:
                if (pretokens := self.pattern.split(part)) is None:
                    return None
                found += pretokens
        return found


def splitter_of(values: Values, *, special_as_text: bool) -> Splitter | None:
    """Return how the tokenizer of a tokenizer.json splits; None if it is of another kind.

    Args:
        special_as_text: Whether special tokens in a text are encoded as any other text.
    """
    from tokenizers import normalizers

    pattern = _pattern(values.get("pre_tokenizer") or {})
    normalizer = values.get("normalizer")
    tokens = values.get("added_tokens") or []
    special = [token for token in tokens if special_as_text and token["special"]]
    added = [token for token in tokens if token not in special]
    steps = [*_steps(values.get("post_processor"))]
    trimming = [step for step in steps if step.get("trim_offsets")]
    if (
        pattern is None
        or not pattern.is_supported()
        or (normalizer is not None and normalizer["type"] != "NFC")
        or any(step["type"] not in ("ByteLevel", "TemplateProcessing") for step in steps)
        or values["model"].get("dropout")
        or any(token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip"))
        or any(token["normalized"] and not token["content"].isascii() for token in added)
        or (trimming and any(token["content"] != token["content"].strip() for token in added))
        or len({token["normalized"] for token in added}) > 1
    ):
        return None
    one_of = _one_of([token["content"] for token in added])
    return Splitter(
        pattern=pattern,
        normalizer=normalizer and normalizers.NFC(),
        added=None if special else one_of,
        hidden=one_of if special else None,
        trims_spaces=bool(trimming),
        trims_first_space=not any(step["add_prefix_space"] for step in trimming),
    )


def _one_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return what matches the longest of some texts, as a group; None if there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _pattern(pre_tokenizer: Values) -> SplitPattern | None:
    """Return the pattern of a byte-level pre-tokenizer; None if it is another."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get(
            "use_regex", True
        ):
            return SplitPattern(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return SplitPattern(pattern)
    return None


def _steps(post_processor: Values | None) -> Iterator[Values]:
    """Yield the post-processors that a sequence of them applies, in order."""
    if post_processor is None:
        return
    if post_processor["type"] != "Sequence":
        yield post_processor
    for step in post_processor.get("processors", ()):
        yield from _steps(step)


def _trimming() -> Any:
    """Return the post-processor that leaves spaces out of offsets, at the beginning as elsewhere.

    Not every version of the library has its option as an argument.
    """
    from tokenizers import Tokenizer, models

    values = json.loads(Tokenizer(models.BPE()).to_str())
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    values["post_processor"] = {"type": "ByteLevel", **options}
    return Tokenizer.from_str(json.dumps(values)).post_processor


class PretokenEncoder(Generic[V]):
    """Encodes texts by their pre-tokens; if it cannot split a text, the library encodes all of it.

    Args:
        backend: A tokenizers.Tokenizer.
        values: The content of its tokenizer.json.
        special_as_text: Whether special tokens in a text are encoded as any other text.
        encode: Encodes texts with a tokenizer.
        encode_added: Encodes an added token, of ``values``.
    """

    def __init__(
        self,
        backend: Any,
        values: Values,
        *,
        special_as_text: bool,
        encode: Callable[[Any, Sequence[str]], list[V]],
        encode_added: Callable[[Values], V],
    ) -> None:
        self._backend, self._encode = backend, encode
        self._splitter = splitter_of(values, special_as_text=special_as_text)
        if self._splitter is None:
            return
        self._pretokens = _pretoken_backend(backend, self._splitter)
        self._added = {
            token["content"]: encode_added(token) for token in values.get("added_tokens") or ()
        }
        self._known: dict[str, V] = {}
        self._bytes = 0

    def encode(self, texts: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[V]]]:
        """Yield the parts of each text that are encoded alone, and what they are encoded to."""
        if self._splitter is None:
            yield from (([text], [value]) for text, value in self._by_library(texts))
            return
        split = [*map(self._splitter.split, texts)]
        others = [text for text, parts in zip(texts, split, strict=True) if parts is None]
        by_library = self._by_library(others)
        known = self._looked_up([parts for parts in split if parts is not None])
        for parts in split:
            if parts is None:
                text, value = next(by_library)
                yield [text], [value]
            else:
                yield parts, [*map(known.__getitem__, parts)]

    def _by_library(self, texts: Sequence[str]) -> Iterator[tuple[str, V]]:
        yield from zip(texts, self._encode(self._backend, texts), strict=True)

    def _looked_up(self, split: Sequence[Sequence[str]]) -> Mapping[str, V]:
        """Return the cache, with what these texts consist of."""
        known = self._known
        new = [*{*chain.from_iterable(split)}.difference(known, self._added)]
        if self._bytes > _MOST_BYTES:
            # Another thread may still read the old one.
            known = self._known = {}
            self._bytes = 0
            new = [*{*chain.from_iterable(split)}.difference(self._added)]
        self._bytes += sum(_ENTRY_BYTES + len(text) for text in new)
        known.update(self._added)
        known.update(zip(new, self._encode(self._pretokens, new), strict=True))
        return known


def _pretoken_backend(backend: Any, splitter: Splitter) -> Any:
    """Return the tokenizers.Tokenizer that encodes pre-tokens: it splits no text."""
    from tokenizers import Tokenizer, pre_tokenizers

    pretokens = Tokenizer(backend.model)
    pretokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if splitter.trims_spaces:
        pretokens.post_processor = _trimming()
    return pretokens
