"""Typed samples: what a data handler makes of one record. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

Message: TypeAlias = Mapping[str, Any]
"""``role`` (system, user, assistant or tool), ``content`` and any other keys of the record, which
the chat template receives."""


@attrs.frozen(kw_only=True)
class Text:
    """One document for pre-training."""

    text: str


@attrs.frozen(kw_only=True)
class Conversation:
    """Messages; every turn of the assistant is trained."""

    messages: tuple[Message, ...]
    tools: Any = None
    documents: Any = None
    """Texts to answer from; the chat template receives them, as it does the tools."""


@attrs.frozen(kw_only=True)
class Preference:
    """Two answers to one prompt; in each, only the answer is trained."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: Any = None
    documents: Any = None


@attrs.frozen(kw_only=True)
class ProcessReward:
    """A solution whose steps are rated one by one."""

    text: str
    """Question and solution; a placeholder stands where a step ends."""
    prompt: tuple[Message, ...] = ()
    """The question, if ``text`` is the solution only; the chat template then renders both."""
    rewards: tuple[str, ...]
    """The rating of each step, in order: the text of one token."""


@attrs.frozen(kw_only=True)
class Prompt:
    """Messages that a model is to answer."""

    messages: tuple[Message, ...]
    tools: Any = None
    documents: Any = None


@attrs.frozen(kw_only=True)
class VerifiablePrompt:
    """Messages that a model is to answer, and the answer that a verifier compares with."""

    messages: tuple[Message, ...]
    answer: str
    tools: Any = None
    documents: Any = None


Sample: TypeAlias = Text | Conversation | Preference | ProcessReward | Prompt | VerifiablePrompt


def texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the text content of every message, and its calls of tools as JSON."""
    for message in messages:
        if message["content"]:
            yield message["content"]
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)
