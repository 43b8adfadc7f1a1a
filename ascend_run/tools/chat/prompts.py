"""Conversations to prompts that fit into the model's longest text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ascend_run.text.templates import TemplateRefusal
from ascend_run.tools.generate.chat_texts import ChatTexts, chat_ids

from .conversation import Conversation


class MessageRefused(Exception):
    """A message cannot be answered, and is no part of the conversation; says why."""


@attrs.frozen(kw_only=True)
class Prompt:
    """What a model gets of a conversation."""

    ids: tuple[int, ...]
    conversation: Conversation
    """Without the turns that were left out."""
    num_dropped: int
    """Turns that were left out because they do not fit."""


@attrs.frozen(kw_only=True, eq=False)
class Prompts:
    """Makes prompts: by the chat template, or else the texts of the turns as they are."""

    chat: ChatTexts
    tools: Sequence[Any] | None = None
    history_turns: int | None = None
    """Turns before the last one that it gets at most; None: as many as fit."""
    longest: int
    """Longest text, prompt and answer. Unit: tokens."""
    room: int
    """Turns leave until an answer of this length fits. Unit: tokens."""
    vocab_size: int

    def prompt(self, conversation: Conversation) -> Prompt:
        """Return the prompt for the next answer, with as many of the last turns as fit.

        Raises:
            MessageRefused: The last turn alone is too long, or cannot be rendered.
        """
        if self.history_turns is not None:
            conversation = conversation.last_turns(self.history_turns + 1)
        ids, num_turns = self._ids(conversation), len(conversation.turns)
        while len(ids) + self.room > self.longest and len(conversation.turns) > 1:
            conversation = conversation.last_turns(len(conversation.turns) - 1)
            ids = self._ids(conversation)
        if not ids:
            raise MessageRefused("it is empty, and the tokenizer adds no token that begins a text")
        if len(ids) >= self.longest:
            raise MessageRefused(
                f"it makes a prompt of {len(ids)} tokens without any earlier turn, and the longest "
                f"text here has {self.longest}, with at least one new one; shorten it"
            )
        if max(ids) >= self.vocab_size:
            raise MessageRefused(
                f"it has the token id {max(ids)}, and the model's vocabulary has "
                f"{self.vocab_size} ids; name the model's own tokenizer with --tokenizer"
            )
        num_dropped = num_turns - len(conversation.turns)
        return Prompt(ids=ids, conversation=conversation, num_dropped=num_dropped)

    def _ids(self, conversation: Conversation) -> tuple[int, ...]:
        if self.chat.template is None:
            return self.chat.texts.ids(_as_typed(conversation))
        try:
            return chat_ids(self.chat.texts, self.chat.template, conversation.messages, self.tools)
        except TemplateRefusal as problem:
            raise MessageRefused(f"the chat template refuses it: {problem}") from None


def _as_typed(conversation: Conversation) -> str:
    """Join turns by line ends, and answers to what they continue."""
    return "\n".join("".join(message["content"] for message in turn) for turn in conversation.turns)
