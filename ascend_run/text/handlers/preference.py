"""Pairs in the formats of Hugging Face and trl, each a record:

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [{"role": "user", "content": "..."}],
     "chosen": [{"role": "assistant", "content": "..."}],
     "rejected": [{"role": "assistant", "content": "..."}]}
    {"chosen": [user, assistant], "rejected": [user, assistant]}

Without `prompt`, or with its text beside lists, it is what both answers begin with. Strings are
turns of the user and of the assistant; with the template `empty` they are trained as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from ascend_run.text.samples import Message, Preference

from . import DataHandler, Key, MalformedRecord, Record
from .messages import OF_TEMPLATE, given_to_template, message_list, tag_keys

_SIDES: Final = ("chosen", "rejected")


def convert(record: Record) -> Preference:
    """Return the pair of a record."""
    for side in _SIDES:
        record.require(side)
    lists = [_is_list(record, side) for side in _SIDES]
    if lists[0] != lists[1]:
        raise MalformedRecord(
            f"{record.own('chosen')!r} is {_kind(lists[0])}, and {record.own('rejected')!r} "
            f"{_kind(lists[1])}; expected both of one kind"
        )
    prompt, chosen, rejected = (_of_lists if lists[0] else _of_strings)(record)
    return Preference(
        prompt=tuple(prompt),
        chosen=_answer(record, "chosen", chosen),
        rejected=_answer(record, "rejected", rejected),
        **given_to_template(record),
    )


_Pair: TypeAlias = tuple[Sequence[Message], Sequence[Message], Sequence[Message]]
"""The prompt, and what follows it in each answer."""


def _of_lists(record: Record) -> _Pair:
    chosen, rejected = (message_list(record, side) for side in _SIDES)
    if _is_list(record, "prompt"):
        return message_list(record, "prompt"), chosen, rejected
    common = _common(record, chosen, rejected)
    return chosen[:common], chosen[common:], rejected[common:]


def _of_strings(record: Record) -> _Pair:
    chosen, rejected = (record.text(side) for side in _SIDES)
    if record.get("prompt") is not None:
        prompt = record.text("prompt")
    else:
        common = _common(record, chosen, rejected)
        if chosen[common] != rejected[common] and common > 1 and chosen[common - 1] == " ":
            common -= 1  # a space belongs to the word after it
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    return _turn("user", prompt), _turn("assistant", chosen), _turn("assistant", rejected)


def _turn(role: str, text: str) -> Sequence[Message]:
    return ({"role": role, "content": text},)


def _common(record: Record, chosen: Any, rejected: Any) -> int:
    """Return how much both begin with, at most all but the last of the shorter one, as trl does.

    Raises:
        MalformedRecord: Nothing.
    """
    shorter = min(len(chosen), len(rejected)) - 1
    differ = (n for n in range(shorter) if chosen[n] != rejected[n])
    if (common := next(differ, shorter)) > 0:
        return common
    raise MalformedRecord(
        f"{record.own('chosen')!r} and {record.own('rejected')!r} begin with no common prompt; add "
        f"{record.own('prompt')!r}"
    )


def _answer(record: Record, side: str, messages: Sequence[Message]) -> Message:
    """Return the message of an answer, of which there must be one."""
    own = record.own(side)
    if len(messages) != 1:
        raise MalformedRecord(
            f"{own!r} has {len(messages)} messages after the prompt; expected one, of the assistant"
        )
    if messages[0]["role"] != "assistant":
        raise MalformedRecord(
            f"{own!r} ends with the role {messages[0]['role']!r}; expected an "
            "answer of the assistant"
        )
    return messages[0]


def _is_list(record: Record, key: str) -> bool:
    """Whether a value is a list of messages; a table has its JSON text."""
    value = record.parsed(key)
    if not isinstance(value, list):
        return False
    return not isinstance(record.get(key), str) or all(isinstance(one, dict) for one in value)


def _kind(is_list: bool) -> str:
    return "a list of messages" if is_list else "not one"


handler = DataHandler(
    name="preference",
    summary="pairs as trl reads them: strings or messages, with a prompt or a common beginning",
    sample=Preference,
    keys=(
        Key("prompt", "the prompt: text or messages; default: what both answers begin with"),
        Key("chosen", "the better answer: text, or messages", required=True),
        Key("rejected", "the worse answer: text, or messages", required=True),
        *OF_TEMPLATE,
        *tag_keys("role", "content"),
    ),
    convert=convert,
)
