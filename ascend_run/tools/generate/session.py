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
        special = self._texts.special_ids(stop)
        request = attrs.evolve(request, end_ids=request.end_ids | special)
        number = self._engine.submit(request)
        self._running[number] = GeneratedText(self._texts.tokenizer.backend, request.prompt, stop)
        return number

    def cancel(self, number: int) -> None:
        """End a sequence, if it has not ended."""
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
            self.cancel(emitted.sequence)
        return Piece(emitted=emitted, text=added, finish=finish)
