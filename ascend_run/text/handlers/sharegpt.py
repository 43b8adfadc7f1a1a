"""Conversations as ShareGPT stores them.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}],
     "system": "...", "tools": "[...]"}

Roles: ``human``, ``gpt``, ``observation`` (a tool's result), ``system``, and ``function_call``, the
JSON of ``{"name": ..., "arguments": {...}}`` or of a list of these. Tools are the definitions of
functions, with or without ``{"type": "function", "function": ...}`` around each.
"""

from __future__ import annotations

import attrs

from ascend_run.text.samples import Conversation
from ascend_run.text.tool_calls import described

from . import DataHandler, Key, Record
from .messages import OF_TEMPLATE, SYSTEM, conversation, tag_keys


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    read = conversation(record, "conversations")
    return attrs.evolve(read, tools=described(read.tools))


handler = DataHandler(
    name="sharegpt",
    summary="conversations of from and value, with tools and their results",
    sample=Conversation,
    keys=(
        Key("conversations", "the messages, in order", required=True),
        SYSTEM,
        *OF_TEMPLATE,
        *tag_keys("from", "value"),
    ),
    convert=convert,
)
