"""Conversations as ShareGPT stores them.

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}],
     "system": "...", "tools": "[...]"}

Roles: ``human``, ``gpt``, ``observation`` (a tool's result), ``function_call``, ``system``.
"""

from __future__ import annotations

from ascend_run.text.samples import Conversation

from . import DataHandler, Key, Record
from .messages import OF_TEMPLATE, SYSTEM, conversation, tag_keys


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    return conversation(record, "conversations")


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
