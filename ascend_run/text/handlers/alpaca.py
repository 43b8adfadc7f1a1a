"""Instructions as Alpaca stores them, with earlier turns.

    {"instruction": "...", "input": "...", "output": "...", "system": "...",
     "history": [["question", "answer"], ...]}

``input`` follows ``instruction`` on a new line.
"""

from __future__ import annotations

from typing import Any, Final

from ascend_run.text.samples import Conversation, Message

from . import DataHandler, Key, MalformedRecord, Record
from .messages import OF_TEMPLATE, SYSTEM, given_to_template, with_system

QUESTION: Final = (
    Key("instruction", "the question or task", required=True),
    Key("input", "what follows the instruction on a new line"),
    SYSTEM,
    Key("history", "earlier turns, pairs of question and answer"),
)


def question(record: Record) -> tuple[Message, ...]:
    """Return the messages up to the question of a record."""
    messages: list[Message] = []
    for pair in record.listed("history", "pairs [question, answer]"):
        if not _is_pair(pair):
            raise MalformedRecord(
                f"{record.own('history')!r} must be a list of pairs [question, answer]"
            )
        messages += exchange(*pair)
    asked = record.text("instruction")
    if more := record.optional_text("input"):
        asked = f"{asked}\n{more}"
    return with_system(record, [*messages, {"role": "user", "content": asked}])


def exchange(asked: str, answer: str) -> list[Message]:
    """Return a turn of the user and one of the assistant."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(t, str) for t in value)


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    answer = {"role": "assistant", "content": record.text("output")}
    return Conversation(messages=(*question(record), answer), **given_to_template(record))


handler = DataHandler(
    name="alpaca",
    summary="instruction, input and output, with history",
    sample=Conversation,
    keys=(*QUESTION, Key("output", "the answer", required=True), *OF_TEMPLATE),
    convert=convert,
)
