"""Conversations in the schema of ``messages``, ``sharegpt`` or ``alpaca``, by each record's keys.

A file may mix the three. Keys cannot be mapped; name one of the three for that.
"""

from __future__ import annotations

from typing import Final

from ascend_run.text.samples import Conversation

from . import DataHandler, MalformedRecord, Record, alpaca, messages, sharegpt

_BY_KEY: Final = {
    "messages": messages.convert,
    "conversations": sharegpt.convert,
    "instruction": alpaca.convert,
}
_TAGS: Final = {"messages": ("role", "content"), "conversations": ("from", "value")}


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    for key, read in _BY_KEY.items():
        if key in record:
            role, content = _TAGS.get(key, ("", ""))
            return read(Record(record.values, {"role_tag": role, "content_tag": content}))
    raise MalformedRecord(
        "expected the key 'messages', 'conversations' or 'instruction' (with 'output'); its "
        f"keys: {record.names()}"
    )


handler = DataHandler(
    name="chat",
    summary="conversations in the schema of `messages`, `sharegpt` or `alpaca`",
    sample=Conversation,
    keys=(),
    convert=convert,
    any_of=(("messages",), ("conversations",), ("instruction", "output")),
)
