"""Solutions whose steps are rated.

    {"input": "question step * step *", "value": ["+", "-"]}

A placeholder ends each step, and ``value`` has one rating for each. With ``instruction``, the
question, ``input`` is the solution only, and the chat template renders both:

    {"instruction": "question", "input": "step * step *", "value": ["+", "-"]}
"""

from __future__ import annotations

from ascend_run.text.samples import Message, ProcessReward

from . import DataHandler, Key, MalformedRecord, Record
from .messages import SYSTEM, with_system


def convert(record: Record) -> ProcessReward:
    """Return the rated solution of a record."""
    record.require("value")
    rewards = record.listed("value", "ratings")
    if not rewards or not all(isinstance(reward, str) for reward in rewards):
        raise MalformedRecord(f"{record.own('value')!r} must be a list of ratings, each a string")
    prompt: list[Message] = []
    if record.optional_text("instruction"):
        prompt.append({"role": "user", "content": record.text("instruction")})
    elif record.get("system"):
        raise MalformedRecord(
            f"has {record.own('system')!r} without {record.own('instruction')!r}, the question"
        )
    return ProcessReward(
        text=record.text("input"), prompt=with_system(record, prompt), rewards=tuple(rewards)
    )


handler = DataHandler(
    name="process-reward",
    summary="solutions with a rating for each step",
    sample=ProcessReward,
    keys=(
        Key("input", "question and solution, with a placeholder after each step", required=True),
        Key("instruction", "the question, if `input` is the solution only"),
        Key("value", "the rating of each step, in order", required=True),
        SYSTEM,
    ),
    convert=convert,
)
