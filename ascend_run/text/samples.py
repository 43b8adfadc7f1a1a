"""Typed samples: what a data handler makes of one record. No torch."""

from __future__ import annotations

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


@attrs.frozen(kw_only=True)
class Preference:
    """Two answers to one prompt; in each, only the answer is trained."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: Any = None


@attrs.frozen(kw_only=True)
class ProcessReward:
    """A solution whose steps are rated one by one."""

    steps: tuple[str, ...]
    """The text before each rating; joined, it is the whole solution."""
    rewards: tuple[str, ...]
    """The rating of each step: the text of one token."""


@attrs.frozen(kw_only=True)
class Prompt:
    """Messages that a model is to answer, and the reference answer for a verifier, if any."""

    messages: tuple[Message, ...]
    answer: str | None = None
    tools: Any = None


Sample: TypeAlias = Text | Conversation | Preference | ProcessReward | Prompt


def texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the text content of every message."""
    for message in messages:
        if message["content"]:
            yield message["content"]
