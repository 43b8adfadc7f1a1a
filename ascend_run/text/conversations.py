"""Read conversations from JSON lines in Alpaca, ShareGPT and role/content format. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Role names in datasets -> role names in chat templates."""

SHOWN_PROBLEMS: Final = 20
"""Problems reported per file; the others are counted."""


@attrs.frozen(kw_only=True)
class Conversation:
    """One sample before rendering."""

    source: str
    """``file:line``."""
    messages: tuple[Mapping[str, object], ...]
    """``role``, ``content`` and any other keys of the line, for the chat template."""
    tools: Any = None


class _Malformed(Exception):
    """A problem of one line, without its file and line number."""


def read_conversations(path: str | Path) -> tuple[list[Conversation], list[str]]:
    """Return the conversations of one file, and its problems, one sentence each."""
    found: list[Conversation] = []
    problems: list[str] = []
    more = 0
    try:
        for number, line in _lines(Path(path)):
            try:
                found.append(_conversation(f"{path}:{number}", line))
            except _Malformed as problem:
                if len(problems) < SHOWN_PROBLEMS:
                    problems.append(f"{path}:{number}: {problem}")
                else:
                    more += 1
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"]
    if more:
        problems.append(f"{path}: {more} more lines cannot be used")
    if not found and not problems:
        problems.append(f"{path} is empty; expected one conversation per line")
    return found, problems


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                yield number, line


def _conversation(source: str, line: str) -> Conversation:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise _Malformed(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _Malformed("not JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise _Malformed(f"expected a JSON object, found {type(record).__name__}")
    if "messages" in record:
        messages = _listed(record, "messages", "role", "content")
    elif "conversations" in record:
        messages = _listed(record, "conversations", "from", "value")
    elif "instruction" in record:
        messages = _alpaca(record)
    else:
        keys = ", ".join(map(repr, sorted(record))) or "none"
        raise _Malformed(
            "expected the key 'messages', 'conversations' or 'instruction' (with 'output'); its "
            f"keys: {keys}"
        )
    if record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    return Conversation(source=source, messages=tuple(messages), tools=record.get("tools") or None)


def _listed(
    record: Mapping[str, object], key: str, role: str, content: str
) -> list[dict[str, object]]:
    """Return a list of messages; both naming schemes of the two keys are accepted."""
    listed = record[key]
    if not isinstance(listed, list) or not listed:
        raise _Malformed(f"{key!r} must be a list of messages")
    messages = []
    for index, message in enumerate(listed, start=1):
        if not isinstance(message, dict):
            raise _Malformed(f"message {index} must be an object with {role!r} and {content!r}")
        own_role = role if role in message else {"role": "from", "from": "role"}[role]
        own_content = (
            content if own_role == role else {"content": "value", "value": "content"}[content]
        )
        if own_role not in message:
            raise _Malformed(f"message {index} lacks {role!r}")
        known = ROLES.get(message[own_role]) if isinstance(message[own_role], str) else None
        if known is None:
            raise _Malformed(
                f"message {index} has the role {message[own_role]!r}; expected one of "
                f"{', '.join(ROLES)}"
            )
        rest = {k: v for k, v in message.items() if k not in (own_role, own_content)}
        text = message.get(own_content)
        if not isinstance(text, str) and not (text is None and message.get("tool_calls")):
            lacks = "lacks" if own_content not in message else "must have a string as"
            raise _Malformed(f"message {index} {lacks} {own_content!r}")
        messages.append({"role": known, "content": text, **rest})
    return messages


def _alpaca(record: Mapping[str, object]) -> list[dict[str, object]]:
    messages: list[dict[str, Any]] = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise _Malformed("'history' must be a list of pairs [question, answer]")
    for pair in history:
        if not _is_pair(pair):
            raise _Malformed("'history' must be a list of pairs [question, answer]")
        messages += _exchange(*pair)
    question = _text(record, "instruction")
    if record.get("input"):
        question = f"{question}\n{_text(record, 'input')}"
    return messages + _exchange(question, _text(record, "output"))


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)
    )


def _exchange(question: str, result: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": result}]


def _text(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        raise _Malformed(f"lacks {key!r}; its keys: {', '.join(map(repr, sorted(record)))}")
    if not isinstance(record[key], str):
        raise _Malformed(f"{key!r} must be a string, found {type(record[key]).__name__}")
    text: str = record[key]
    return text


def texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text content of every message."""
    for message in messages:
        if message["content"]:
            yield message["content"]
