"""The text of new tokens, as they come: whole characters, and no part of a stop word.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

_INCOMPLETE: Final = "\ufffd"
"""What decoders make of a character that lacks bytes."""


class GeneratedText:
    """Decodes the tokens that follow a prompt. Special tokens have no text.

    A decoder may drop the first space of a text, or join tokens; so new tokens are decoded together
    with those before them, back to the last that gave text.

    Args:
        stop: Words that end the text; it ends before the first of them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._backend, self._words = backend, _StopWords(stop)
        self._ids = [*prompt]
        if backend.decode(self._ids).endswith(_INCOMPLETE):
            self._ids = []  # the prompt ends within a character
        self._num_decoded = len(self._ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop word has come."""
        return self._words.found

    def push(self, token: int) -> str:
        """Return the text that is certain now; it may be empty."""
        self._ids.append(token)
        new = self._new()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._ids = self._ids[self._num_decoded :]
        self._num_decoded = len(self._ids)
        return self._words.push(new)

    def finish(self) -> str:
        """Return what was held back: there are no more tokens."""
        return self._words.push(self._new()) + self._words.finish()

    def _new(self) -> str:
        before = self._backend.decode(self._ids[: self._num_decoded])
        text: str = self._backend.decode(self._ids)
        if not text.startswith(before):
            text, before = self._backend.decode(self._ids[self._num_decoded :]), ""
        return text[len(before) :]


class _StopWords:
    """Passes text on up to the first of some words, whatever pieces it comes in."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(word), at) for word in self._words if (at := text.find(word)) >= 0]
        if ends:  # the word that is complete first; of several, the longest
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        begun = max((_begun(text, word) for word in self._words), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _begun(text: str, word: str) -> int:
    """Return how many of the last characters may begin the word."""
    longest = min(len(word) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
