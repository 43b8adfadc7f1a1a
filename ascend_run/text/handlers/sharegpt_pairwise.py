"""Pairs of answers to one conversation.

{"conversations": [{"from": "human", "value": "..."}],
 "chosen": {"from": "gpt", "value": "..."}, "rejected": {"from": "gpt", "value": "..."}}
"""

from __future__ import annotations

import attrs

from ascend_run.text.samples import Message, Preference
from ascend_run.text.tool_calls import described

from . import DataHandler, Key, MalformedRecord, Record
from .messages import (
    OF_TEMPLATE,
    SYSTEM,
    given_to_template,
    message_list,
    one_message,
    tag_keys,
    with_system,
)


def convert(record: Record) -> Preference:
    """Return the pair of a record."""
    pair = Preference(
        prompt=with_system(record, message_list(record, "conversations")),
        chosen=_answer(record, "chosen"),
        rejected=_answer(record, "rejected"),
        **given_to_template(record),
    )
    return attrs.evolve(pair, tools=described(pair.tools))


def _answer(record: Record, key: str) -> Message:
    own = record.own(key)
    record.require(key)
    answer = one_message(record, record.parsed(key), repr(own))
    if answer["role"] != "assistant":
        raise MalformedRecord(f"{own!r} is not of the assistant")
    return answer


handler = DataHandler(
    name="sharegpt-pairwise",
    summary="conversations with a chosen and a rejected answer",
    sample=Preference,
    keys=(
        Key("conversations", "the messages up to the question", required=True),
        Key("chosen", "the better answer, a message", required=True),
        Key("rejected", "the worse answer, a message", required=True),
        SYSTEM,
        *OF_TEMPLATE,
        *tag_keys("from", "value"),
    ),
    convert=convert,
)
