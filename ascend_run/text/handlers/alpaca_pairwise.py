"""Pairs of answers to one instruction.

{"instruction": "...", "input": "...", "system": "...", "history": [["question", "answer"]],
 "chosen": "...", "rejected": "..."}
"""

from __future__ import annotations

from ascend_run.text.samples import Preference

from . import DataHandler, Key, Record
from .alpaca import QUESTION, question


def convert(record: Record) -> Preference:
    """Return the pair of a record."""
    return Preference(
        prompt=question(record),
        chosen={"role": "assistant", "content": record.text("chosen")},
        rejected={"role": "assistant", "content": record.text("rejected")},
    )


handler = DataHandler(
    name="alpaca-pairwise",
    summary="instruction and input with a chosen and a rejected answer",
    sample=Preference,
    keys=(
        *QUESTION,
        Key("chosen", "the better answer", required=True),
        Key("rejected", "the worse answer", required=True),
    ),
    convert=convert,
)
