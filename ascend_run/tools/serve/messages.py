"""Messages of a chat and the tools that it may call, as a request has them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .errors import ApiError
from .fields import Fields, parsed, wrong

Message = Mapping[str, Any]
"""As chat templates read it: arguments of calls are objects."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_IGNORED: Final = dict.fromkeys(
    ("name", "refusal", "function_call", "annotations", "audio"), lambda value: not value
)
"""A client sends an answer back with fields that are null or empty."""


def messages_of(value: Any) -> tuple[Message, ...]:
    """
    Raises:
        ApiError: There is no message, or one has a wrong or an unknown field.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    names: dict[str, str] = {}
    return tuple(_message(f"messages[{index}]", one, names) for index, one in enumerate(value))


def tools_of(value: Any, choice: Any) -> tuple[Any, ...] | None:
    """Return definitions of functions, if the model may call them.

    Args:
        choice: ``tool_choice``.

    Raises:
        ApiError: One is no function, or the model is to call one.
    """
    if choice not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice={json.dumps(choice)} is not supported: expected auto or none",
            param="tool_choice",
        )
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise wrong("tools", value, "a list of functions")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            raise wrong(f"tools[{index}]", tool, "an object with type function and its function")
    return None if choice == "none" else tuple(value)


def names_of(tools: Sequence[Any] | None) -> frozenset[str]:
    """Return the names of functions."""
    return frozenset(tool["function"]["name"] for tool in tools or ())


def _message(name: str, value: Any, names: dict[str, str]) -> Message:
    """
    Args:
        names: Id -> name of the calls so far; those of this message are added.
    """
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with role and content")
    fields = Fields(value)
    role, content = fields.any("role"), fields.any("content")
    if role not in _ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(_ROLES)}")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant" and (calls := fields.any("tool_calls")):
        found["tool_calls"] = _calls(f"{name}.tool_calls", calls)
        names.update((call["id"], call["function"]["name"]) for call in found["tool_calls"])
        content = content or ""
    if role == "tool":
        number = fields.any("tool_call_id")
        if not isinstance(number, str) or number not in names:
            raise wrong(f"{name}.tool_call_id", number, "the id of a call in an earlier message")
        found |= {"tool_call_id": number, "name": fields.any("name") or names[number]}
    found["content"] = _text(f"{name}.content", content)
    fields.without_effect({**_IGNORED, "tool_calls": lambda value: not value})
    fields.finish()
    return found


def _text(name: str, content: Any) -> str:
    if isinstance(content, list):
        parts = [_text_of_part(f"{name}[{index}]", one) for index, one in enumerate(content)]
        return "".join(parts)
    if not isinstance(content, str):
        raise wrong(name, content, "a string, or a list of parts of type text")
    return content


def _text_of_part(name: str, value: Any) -> str:
    fields = Fields(value if isinstance(value, dict) else {})
    text = fields.any("text")
    if fields.any("type") != "text" or not isinstance(text, str):
        raise wrong(name, value, "an object with type text and its text")
    return text


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong(name, value, "a list of calls")
    return [_call(f"{name}[{index}]", one) for index, one in enumerate(value)]


def _call(name: str, value: Any) -> dict[str, Any]:
    call = value if isinstance(value, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict):
        function = {}
    arguments, texts = _arguments(function), (call.get("id"), function.get("name"))
    if arguments is None or not all(isinstance(text, str) for text in texts):
        raise wrong(
            name,
            value,
            "an object with id, type function, and the name and the arguments, a JSON object as "
            "text, of its function",
        )
    called = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": called}


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the arguments of a call; None: they are no object as text."""
    text = function.get("arguments")
    try:
        return parsed(text.encode()) if isinstance(text, str) else None
    except ApiError:
        return None
