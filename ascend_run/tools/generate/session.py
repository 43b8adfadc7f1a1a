"""Texts of the sequences of an engine, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.ops.generation.engine import Emitted, Engine, Finish, Request
from ascend_run.text.generated_text import GeneratedText

from .texts import Texts


@attrs.frozen(kw_only=True)
class Piece:
    """What one new token adds to a text."""

    emitted: Emitted
    text: str
    """It may be empty: of half a character, or of what may become a stop word."""
    finish: Finish | None


class Session:
    """Requests with stop words, on an engine.

    Numbers of sequences are those of the engine.
    """

    def __init__(self, engine: Engine, texts: Texts) -> None:
        self._engine, self._texts = engine, texts
        self._running: dict[int, GeneratedText] = {}

    def submit(self, request: Request, stop: Sequence[str] = ()) -> int:
        """Queue a request; its text ends before the first stop word.

        A stop word that is a special token has no text: its id ends the sequence.

        Raises:
            CacheFull: It needs more than the whole cache.
        """
        number = self._engine.submit(self._with_ends(request, stop))
        self._running[number] = self._text(request, stop)
        return number

    def resume(self, number: int, request: Request, stop: Sequence[str] = ()) -> None:
        """Queue the next request of a sequence that has ended; see ``Engine.resume``.

        Raises:
            CacheFull: It needs more than the whole cache.
        """
        self._engine.resume(number, self._with_ends(request, stop))
        self._running[number] = self._text(request, stop)

    def num_cached(self, number: int) -> int:
        """Return how many tokens of its prompt were not computed; see ``Engine.num_cached``."""
        return self._engine.num_cached(number)

    def end(self, number: int) -> str:
        """End a sequence, if it has not ended; a request may keep its tokens in the cache.

        Returns:
            The text that was withheld, because it may have become a stop word or a character.
        """
        self._engine.end(number)
        text = self._running.pop(number, None)
        return "" if text is None else text.finish()

    def cancel(self, number: int) -> None:
        """End a sequence, if it has not ended, and forget it."""
        self._engine.cancel(number)
        self._running.pop(number, None)

    def step(self) -> list[Piece]:
        """Run one forward and return what it adds to each text; none if nothing is left to do."""
        return [self._piece(one) for one in self._engine.step()]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return self._engine.is_idle

    def _piece(self, emitted: Emitted) -> Piece:
        text, finish = self._running[emitted.sequence], emitted.finish
        added = text.push(emitted.token)
        if finish is not None:
            added += text.finish()
        if text.stopped:
            finish = Finish.STOP
        if finish is not None:
            self.end(emitted.sequence)
        return Piece(emitted=emitted, text=added, finish=finish)

    def _with_ends(self, request: Request, stop: Sequence[str]) -> Request:
        special = self._texts.special_ids(stop)
        return attrs.evolve(request, end_ids=request.end_ids | special)

    def _text(self, request: Request, stop: Sequence[str]) -> GeneratedText:
        return GeneratedText(self._texts.tokenizer.backend, request.prompt, stop)
