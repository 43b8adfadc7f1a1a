"""Prompts of Alpaca's schema, without their answers, for reinforcement learning.

{"instruction": "...", "input": "...", "system": "...", "history": [["question", "answer"]]}
"""

from __future__ import annotations

from ascend_run.text.samples import Prompt

from . import DataHandler, Record
from .alpaca import QUESTION, question


def convert(record: Record) -> Prompt:
    """Return the prompt of a record."""
    return Prompt(messages=question(record))


handler = DataHandler(
    name="prompt",
    summary="instruction and input as a prompt, without an answer",
    sample=Prompt,
    keys=QUESTION,
    convert=convert,
)
