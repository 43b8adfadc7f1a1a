"""Solutions whose steps are rated.

    {"input": "question step * step *", "value": ["+", "-"]}

A placeholder ends each step, and ``value`` has one rating for each.
"""

from __future__ import annotations

from ascend_run.text.samples import ProcessReward

from . import DataHandler, Key, MalformedRecord, Record


def convert(record: Record) -> ProcessReward:
    """Return the rated solution of a record."""
    record.require("value")
    rewards = record.listed("value", "ratings")
    if not rewards or not all(isinstance(reward, str) for reward in rewards):
        raise MalformedRecord(f"{record.own('value')!r} must be a list of ratings, each a string")
    return ProcessReward(text=record.text("input"), rewards=tuple(rewards))


handler = DataHandler(
    name="process-reward",
    summary="solutions with a rating for each step",
    sample=ProcessReward,
    keys=(
        Key("input", "question and solution, with a placeholder after each step", required=True),
        Key("value", "the rating of each step, in order", required=True),
    ),
    convert=convert,
)
