"""Conversations of BELLE: earlier turns stand in the instruction, marked by the speaker.

    {"instruction": "Human: ...\\nAssistant: ...\\nHuman: ...\\nAssistant:", "input": "",
     "output": "..."}

An instruction that does not begin with ``Human:`` is one question; otherwise speakers alternate.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from ascend_run.text.samples import Conversation, Message

from . import DataHandler, Key, MalformedRecord, Record
from .messages import SYSTEM, with_system

_SPEAKER: Final = re.compile(r"(?:\A|\n)\s*(Human|Assistant)\s*[:\uff1a]")
_ROLES: Final = {"Human": "user", "Assistant": "assistant"}


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    asked = record.text("instruction")
    if more := record.optional_text("input"):
        asked = f"{asked}\n{more}"
    before, *marked = _SPEAKER.split(asked)
    if before.strip() or not marked:
        messages: list[Message] = [{"role": "user", "content": asked}]
    else:
        messages = [
            {"role": _ROLES[speaker], "content": text.strip()}
            for speaker, text in zip(marked[::2], marked[1::2], strict=True)
        ]
        if messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
            messages.pop()
        roles = [message["role"] for message in messages]
        if any(one == other for one, other in pairwise(roles)):
            raise MalformedRecord(
                f"{record.own('instruction')!r} has two turns of one speaker in a row; Human and "
                "Assistant must alternate"
            )
        if roles[-1:] != ["user"]:
            raise MalformedRecord(
                f"{record.own('instruction')!r} must end with a turn of Human, or with 'Assistant:'"
            )
    answer = {"role": "assistant", "content": record.text("output").strip()}
    return Conversation(messages=with_system(record, [*messages, answer]))


handler = DataHandler(
    name="belle",
    summary="several turns in one instruction, marked Human and Assistant",
    sample=Conversation,
    keys=(
        Key("instruction", "the turns up to the question", required=True),
        Key("input", "what follows the instruction on a new line"),
        Key("output", "the answer", required=True),
        SYSTEM,
    ),
    convert=convert,
)
