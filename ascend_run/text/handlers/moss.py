"""Conversations of MOSS: numbered turns, with what each speaker says between marks.

    {"meta_instruction": "...", "num_turns": 2, "chat": {
        "turn_1": {"Human": "<|Human|>: ...<eoh>\\n", "MOSS": "<|MOSS|>: ...<eom>\\n"},
        "turn_2": {...}}}

The marks are removed. ``Inner Thoughts``, ``Commands`` and ``Tool Responses`` of a turn are not
read.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ascend_run.text.samples import Conversation, Message

from . import DataHandler, Key, MalformedRecord, Record

_MARKS: Final = re.compile(r"\A\s*<\|\w+\|>:|<eo[hmtcra]>\s*\Z")
_SPEAKERS: Final = (("Human", "user"), ("MOSS", "assistant"))


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    record.require("chat")
    chat, own = record.parsed("chat"), record.own("chat")
    if not isinstance(chat, dict) or not chat:
        raise MalformedRecord(f"{own!r} must be an object of turns, turn_1 and so on")
    messages: list[Message] = []
    if system := record.optional_text("meta_instruction").strip():
        messages.append({"role": "system", "content": system})
    for number in range(1, len(chat) + 1):
        messages += _turn(chat.get(f"turn_{number}"), f"turn_{number} of {own!r}")
    return Conversation(messages=tuple(messages))


def _turn(turn: Any, name: str) -> list[Message]:
    if not isinstance(turn, dict):
        raise MalformedRecord(f"{name} must be an object with 'Human' and 'MOSS'")
    messages: list[Message] = []
    for speaker, role in _SPEAKERS:
        said = turn.get(speaker)
        if not isinstance(said, str):
            raise MalformedRecord(f"{name} must have a string as {speaker!r}")
        messages.append({"role": role, "content": _MARKS.sub("", said).strip()})
    return messages


handler = DataHandler(
    name="moss",
    summary="numbered turns of Human and MOSS",
    sample=Conversation,
    keys=(
        Key("chat", "the turns, turn_1 and so on", required=True),
        Key("meta_instruction", "system message"),
    ),
    convert=convert,
)
