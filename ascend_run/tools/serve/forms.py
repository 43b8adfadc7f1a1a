"""Answers in the forms of OpenAI's API."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs

from ascend_run.ops.generation.engine import Emitted, Finish
from ascend_run.text.answered_calls import AnsweredCalls, TextBeforeCalls, calls_of_answer
from ascend_run.tools.generate.session import Piece
from ascend_run.tools.generate.texts import Texts

_LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; so in OpenAI's API."""
TOOL_CALLS: Final = "tool_calls"
"""Why an answer ended that has calls."""
_INCOMPLETE: Final = "\ufffd"
"""What decoders make of a character that lacks bytes."""


@attrs.define(kw_only=True, eq=False)
class Form(ABC):
    """The form of one request's answers, one for each prompt, whole or in chunks."""

    model: str
    texts: Texts
    num_prompt: int
    """Tokens of all prompts."""
    include_usage: bool
    """Whether a last chunk tells the numbers of tokens."""
    tools: frozenset[str] = frozenset()
    """Names of the functions that the model may call."""
    num_new: int = 0
    """Tokens so far."""
    _number: str = attrs.field(factory=lambda: secrets.token_hex(12))
    _created: int = attrs.field(factory=lambda: int(time.time()))

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def whole(self, answers: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the body of complete answers."""
        choices = [
            {"index": index, **self._whole(index, pieces)} for index, pieces in enumerate(answers)
        ]
        return {**self._head(self.kind, *choices), "usage": self._usage()}

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before the first piece."""
        return []

    def chunk(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the chunk of pieces of one answer that came together."""
        return self._chunk({"index": index, **self._part(index, pieces)})

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks after the last piece."""
        if not self.include_usage:
            return []
        return [{**self._head(self.chunk_kind), "usage": self._usage()}]

    @abstractmethod
    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the choice of a complete answer, without what all choices have."""

    @abstractmethod
    def _part(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the choice of a chunk, likewise."""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        head = self._head(self.chunk_kind, choice)
        return {**head, "usage": None} if self.include_usage else head

    def _head(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self._number}",
            "object": kind,
            "created": self._created,
            "model": self.model,
            "choices": [*choices],
        }

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_new,
            "total_tokens": self.num_prompt + self.num_new,
        }

    def _count(self, pieces: Sequence[Piece]) -> tuple[str, Finish | None]:
        self.num_new += len(pieces)
        return "".join(piece.text for piece in pieces), pieces[-1].finish


@attrs.define(kw_only=True, eq=False)
class CompletionForm(Form):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _offsets: Counter[int] = attrs.field(factory=Counter)
    """Of each answer: characters of its tokens so far."""

    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return self._part(index, pieces)

    def _part(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text, finish = self._count(pieces)
        return {"text": text, "logprobs": self._logprobs(index, pieces), "finish_reason": finish}

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if pieces[0].emitted.logprob is None:
            return None
        tokens = [self.texts.token(piece.emitted.token) for piece in pieces]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(piece.emitted.logprob) for piece in pieces],
            "top_logprobs": [self._by_text(piece.emitted) for piece in pieces],
            "text_offset": offsets,
        }

    def _by_text(self, emitted: Emitted) -> dict[str, float]:
        """Of tokens of the same text, such as parts of characters, the most probable one counts."""
        found: dict[str, float] = {}
        for number, logprob in emitted.top:
            found.setdefault(self.texts.token(number), _finite(logprob))
        return found


@attrs.define(kw_only=True, eq=False)
class ChatForm(Form):
    """Of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    _text: str = ""
    """So far, if it may have calls."""
    _before_calls: TextBeforeCalls = attrs.field(factory=TextBeforeCalls)

    def begin(self) -> list[dict[str, Any]]:
        choice = self._choice({"delta": {"role": "assistant", "content": ""}})
        return [self._chunk({"index": 0, **choice})]

    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text, finish = self._count(pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if found := self._calls(text):
            message |= {"content": found.content or None, "tool_calls": _records(found)}
        reason = TOOL_CALLS if found else finish
        return self._choice({"message": message}, self._logprobs(pieces), reason)

    def _part(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text, finish = self._count(pieces)
        found = None
        if self.tools:
            self._text += text
            text = self._before_calls.push(text)
            if finish is not None and (found := self._calls(self._text)) is None:
                text += self._before_calls.finish()
        delta: dict[str, Any] = {"content": text} if text else {}
        if found:
            calls = enumerate(_records(found))
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        reason = TOOL_CALLS if found else finish
        return self._choice({"delta": delta}, self._logprobs(pieces), reason)

    def _calls(self, text: str) -> AnsweredCalls | None:
        return calls_of_answer(text, self.tools) if self.tools else None

    def _choice(
        self, content: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {**content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if pieces[0].emitted.logprob is None:
            return None
        return {"content": [self._of_token(piece.emitted) for piece in pieces], "refusal": None}

    def _of_token(self, emitted: Emitted) -> dict[str, Any]:
        top = [self._logprob(*pair) for pair in emitted.top]
        return {**self._logprob(emitted.token, emitted.logprob), "top_logprobs": top}

    def _logprob(self, number: int, logprob: float | None) -> dict[str, Any]:
        token = self.texts.token(number)
        content = None if _INCOMPLETE in token else [*token.encode()]
        return {"token": token, "logprob": _finite(logprob), "bytes": content}


def _records(found: AnsweredCalls) -> list[dict[str, Any]]:
    """Return calls with ids, and arguments as text."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in found.calls
    ]


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "asked for"
    return max(logprob, _LEAST_LOGPROB)
