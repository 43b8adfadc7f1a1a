"""Calls of tools as datasets store them, and as chat templates receive them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from .samples import Conversation, Message

CALLS: Final = "tool_calls"
"""Key of a message: the calls that the assistant makes, as the templates of transformers read
them."""


def calls_of_text(text: str) -> list[dict[str, Any]] | None:
    """Return the calls in the text of a ``function_call``, in the form of ``tool_calls``.

    Args:
        text: JSON of ``{"name": ..., "arguments": {...}}``, or of a list of these. Arguments may
            be JSON text themselves.

    Returns:
        None if the text is something else.
    """
    parsed = _object(text)
    calls = [*map(_function, parsed if isinstance(parsed, list) else [parsed])]
    if not calls or None in calls:
        return None
    return [{"type": "function", "function": call} for call in calls]


def _function(call: object) -> dict[str, Any] | None:
    if not isinstance(call, Mapping) or call.keys() != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    return {"name": name, "arguments": arguments}


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def described(tools: Sequence[Any] | None) -> list[Any] | None:
    """Return definitions of tools as the templates of transformers read them: one without a type
    is that of a function."""
    if tools is None:
        return None
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, Mapping) and "name" in tool and "type" not in tool
        else tool
        for tool in tools
    ]


def calls_as_text(conversation: Conversation) -> Conversation:
    """Return a conversation in which a call is the JSON text of its message, for a template without
    a form for calls."""
    if not any(message.get(CALLS) for message in conversation.messages):
        return conversation
    return attrs.evolve(conversation, messages=tuple(map(_as_text, conversation.messages)))


def _as_text(message: Message) -> Message:
    calls = message.get(CALLS)
    if not calls or message["content"]:
        return message
    functions = [
        call.get("function", call) if isinstance(call, Mapping) else call for call in calls
    ]
    text = json.dumps(functions[0] if len(functions) == 1 else functions, ensure_ascii=False)
    return {**{key: value for key, value in message.items() if key != CALLS}, "content": text}
