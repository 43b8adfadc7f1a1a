"""A conversation with a model: each answer continues all that was said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ascend_run.ops.generation.engine import Emitted, Request
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.text.answered_calls import TextBeforeCalls, calls_of_answer
from ascend_run.tools.generate.session import Session

from .conversation import Conversation, Message
from .prompts import Prompts

INTERRUPTED = "interrupted"
TOOL_CALLS = "tool_calls"
"""Of OpenAI's API."""


@attrs.frozen(kw_only=True)
class Answer:
    """What a model said."""

    text: str
    """All of it, calls too; without the stop word that ended it."""
    content: str
    """The text before the calls, if there are any."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Calls of tools, in the form of OpenAI's API but for ``arguments``, which are an object."""
    emitted: tuple[Emitted, ...]
    finish: str
    """``stop``, ``length``, ``tool_calls`` or ``interrupted``."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were in the cache, and so were not computed."""
    num_dropped: int = 0
    """Turns that do not fit into the longest text any more."""


@attrs.frozen(kw_only=True)
class ChatSettings:
    """How a model answers."""

    max_new_tokens: int
    sampling: Sampling = attrs.field(factory=Sampling)
    stop: tuple[str, ...] = ()
    tools: frozenset[str] = frozenset()
    """Names of the tools that it may call."""


class Chat:
    """Keeps a conversation, and the keys and values of its tokens in the cache.

    Attributes:
        conversation: What was said; turns that do not fit have been dropped.
    """

    def __init__(
        self, session: Session, prompts: Prompts, settings: ChatSettings, conversation: Conversation
    ) -> None:
        self.conversation = conversation
        self._session, self._prompts, self._settings = session, prompts, settings
        self._sequence: int | None = None
        self._num_answers = self._num_calls = 0

    @property
    def seed(self) -> int:
        """Of the draws."""
        return self._settings.sampling.seed

    def answer(
        self,
        message: Message,
        on_text: Callable[[str], None] = lambda text: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Add a message and the model's answer to the conversation.

        Args:
            on_text: Called with each piece of the answer, but for calls.
            is_interrupted: Whether the answer is to end; asked after each token.

        Raises:
            MessageRefused: It cannot be answered; the conversation is as before.
        """
        prompt = self._prompts.prompt(self.conversation.with_message(message))
        left = self._prompts.longest - len(prompt.ids)
        request = Request(
            prompt=prompt.ids,
            max_new_tokens=min(self._settings.max_new_tokens, left),
            end_ids=self._prompts.chat.texts.end_ids,
            sampling=self._settings.sampling.of_prompt(self._num_answers),
            is_kept=True,
        )
        self._num_answers += 1
        answer = self._generated(request, on_text, is_interrupted)
        self.conversation = prompt.conversation.with_message(self._message(answer))
        return attrs.evolve(answer, num_dropped=prompt.num_dropped)

    def _generated(
        self, request: Request, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]
    ) -> Answer:
        session, sequence = self._session, self._sequence
        if sequence is None:
            sequence = self._sequence = session.submit(request, self._settings.stop)
        else:
            session.resume(sequence, request, self._settings.stop)
        before_calls = TextBeforeCalls() if self._settings.tools else None
        text, emitted, finish = "", list[Emitted](), ""

        def add(piece: str) -> None:
            nonlocal text
            text += piece
            on_text(before_calls.push(piece) if before_calls else piece)

        while not finish:
            for piece in session.step():
                emitted.append(piece.emitted)
                finish = piece.finish or ""
                add(piece.text)
            if not finish and is_interrupted():
                finish = INTERRUPTED
                add(session.end(sequence))
        found = calls_of_answer(text, self._settings.tools) if before_calls else None
        if before_calls and found is None:
            on_text(before_calls.finish())
        return Answer(
            text=text,
            content=text if found is None else found.content,
            calls=self._numbered(found.calls) if found else (),
            emitted=tuple(emitted),
            finish=TOOL_CALLS if found else finish,
            prompt_tokens=len(request.prompt),
            cached_tokens=session.num_cached(sequence),
        )

    def _numbered(self, calls: tuple[dict[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
        """Give calls ids: of 9 characters, as Mistral's templates want them."""
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return tuple({"id": f"call{first + at:05d}", **call} for at, call in enumerate(calls))

    def _message(self, answer: Answer) -> Message:
        """Return an answer as the template reads it: what it does with reasoning is its own."""
        if not answer.calls:
            return {"role": "assistant", "content": answer.text}
        template = self._prompts.chat.template
        content = answer.content if template and template.renders_calls else answer.text
        return {"role": "assistant", "content": content, "tool_calls": [*answer.calls]}
