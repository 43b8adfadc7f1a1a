"""Conversations as lists of messages.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
 "tools": [...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_run.text.records import shortened
from ascend_run.text.samples import Conversation, Message
from ascend_run.text.sources.unicode_text import lone_surrogate
from ascend_run.text.tool_calls import CALLS, calls_of_text
from ascend_run.text.turn_weights import WEIGHT, weight_problem

from . import DataHandler, Key, MalformedRecord, Record

FUNCTION_CALL: Final = "function_call"
ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    FUNCTION_CALL: FUNCTION_CALL,
    "tool": "tool",
    "observation": "tool",
}
"""Role names in datasets -> role names in chat templates; or ``function_call``, whose text becomes
``tool_calls`` of the assistant."""

TAGS: Final[Mapping[str, str]] = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "function_tag": FUNCTION_CALL,
    "observation_tag": "tool",
}
"""Keys of a handler that name a role in the source -> the role in chat templates."""

_NAMES: Final = (("role", "content"), ("from", "value"))


def tag_keys(role: str, content: str) -> tuple[Key, ...]:
    """Return the keys that rename the parts of a message and its roles."""
    return (
        Key("role_tag", "key of a message's role", default=role),
        Key("content_tag", "key of a message's text", default=content),
        Key("user_tag", "role of the user"),
        Key("assistant_tag", "role of the assistant"),
        Key("observation_tag", "role of a tool's result"),
        Key("function_tag", "role of a call of a tool, which the assistant writes"),
        Key("system_tag", "role of the system message"),
    )


def _roles(record: Record) -> Mapping[str, str]:
    named = {record.keys[tag]: role for tag, role in TAGS.items() if tag in record.keys}
    return {**ROLES, **named}


def message_list(record: Record, key: str, *, weighs: bool = False) -> list[dict[str, Any]]:
    """Return the messages under a key, with the roles of chat templates.

    Messages may have ``role`` and ``content`` or ``from`` and ``value``, or what the tags name.

    Args:
        weighs: Whether turns of the assistant may have a weight.
    """
    record.require(key)
    listed = record.parsed(key)
    if not isinstance(listed, list) or not listed:
        raise MalformedRecord(f"{record.own(key)!r} must be a list of messages")
    names, roles = _names(record), _roles(record)
    return [
        _weighed(_message(value, names, roles, i), i, weighs) for i, value in enumerate(listed, 1)
    ]


def one_message(record: Record, message: Any, name: str) -> dict[str, Any]:
    """Return one message with the role of chat templates; ``name`` is for messages."""
    return _weighed(_message(message, _names(record), _roles(record), name), name, weighs=False)


def _names(record: Record) -> Sequence[tuple[str, str]]:
    """Return the keys that a message's role and text may have, the record's own first."""
    return ((record.own("role_tag"), record.own("content_tag")), *_NAMES)


def _message(
    message: Any, names: Sequence[tuple[str, str]], roles: Mapping[str, str], name: str | int
) -> dict[str, Any]:
    """Return one message.

    Args:
        name: For messages: of the message, or its number.
    """
    if not isinstance(message, dict):
        role, content = names[0]
        raise MalformedRecord(f"{_called(name)} must be an object with {role!r} and {content!r}")
    own_role, own_content = names[0]
    if own_role not in message:
        own_role, own_content = next((pair for pair in names if pair[0] in message), names[0])
        if own_role not in message:
            raise MalformedRecord(f"{_called(name)} lacks {own_role!r}")
    value, text = message[own_role], message.get(own_content)
    known = roles.get(value) if isinstance(value, str) else None
    if known is None:
        raise MalformedRecord(
            f"{_called(name)} has the role {value!r}; expected one of {', '.join(roles)}; rename "
            "it, or map it, as in user_tag=NAME"
        )
    if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
        lacks = "lacks" if own_content not in message else "must have a string as"
        raise MalformedRecord(f"{_called(name)} {lacks} {own_content!r}")
    made: dict[str, Any] = {"role": known, "content": text}
    if known == FUNCTION_CALL:
        made = {"role": "assistant", "content": "", CALLS: _calls(text, value, _called(name))}
    if len(message) > 2 or text is None:
        made |= {k: v for k, v in message.items() if k not in (own_role, own_content)}
    return made


def _calls(text: Any, role: str, called: str) -> list[dict[str, Any]]:
    """Return the calls of a message whose role says that it has nothing else."""
    calls = calls_of_text(text) if isinstance(text, str) else None
    if calls is None:
        raise MalformedRecord(
            f"{called} has the role {role!r} and the text {shortened(text)}; expected the JSON of "
            '{"name": ..., "arguments": {...}}, or of a list of these; correct it, or give it the '
            "role of the assistant"
        )
    if half := lone_surrogate(str(text), calls):
        raise MalformedRecord(f"{called} {half}")
    return calls


def _weighed(message: dict[str, Any], name: str | int, weighs: bool) -> dict[str, Any]:
    """Return a message whose weight is right, or without one if that is null."""
    if WEIGHT not in message:
        return message
    if message[WEIGHT] is None:  # as a table has it
        del message[WEIGHT]
    elif not weighs:
        raise MalformedRecord(
            f"{_called(name)} has the weight {message[WEIGHT]!r}, and only turns of whole "
            "conversations have one; remove it"
        )
    elif problem := weight_problem(message):
        raise MalformedRecord(f"{_called(name)} {problem}")
    return message


def _called(name: str | int) -> str:
    return f"message {name}" if isinstance(name, int) else name


def with_system(record: Record, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put the record's ``system`` before messages that begin with none."""
    if record.get("system") and (not messages or messages[0]["role"] != "system"):
        return ({"role": "system", "content": record.text("system")}, *messages)
    return tuple(messages)


def given_to_template(record: Record) -> dict[str, list[Any] | None]:
    """Return a record's ``tools`` and ``documents``; None for what it lacks."""
    return {
        key.name: record.listed(key.name, f"{key.name}, or JSON text of one") or None
        for key in OF_TEMPLATE
    }


def conversation(record: Record, key: str) -> Conversation:
    """Return the conversation under a key, with the record's system message and tools."""
    listed = message_list(record, key, weighs=True)
    turns = [message for message in listed if message["role"] == "assistant"]
    if turns and all(turn.get(WEIGHT) == 0 for turn in turns):
        raise MalformedRecord(
            "every turn of the assistant has the weight 0, so nothing is trained; give one of them "
            "a weight above 0, or remove the row"
        )
    return Conversation(messages=with_system(record, listed), **given_to_template(record))


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    return conversation(record, "messages")


SYSTEM: Final = Key("system", "system message, if the messages begin with none")
OF_TEMPLATE: Final = (
    Key("tools", "tools that the template receives: a list, or JSON text of one"),
    Key("documents", "documents that the template receives: a list, or JSON text of one"),
)

handler = DataHandler(
    name="messages",
    summary="conversations of role and content",
    sample=Conversation,
    keys=(
        Key("messages", "the messages, in order", required=True),
        SYSTEM,
        *OF_TEMPLATE,
        *tag_keys("role", "content"),
    ),
    convert=convert,
)
