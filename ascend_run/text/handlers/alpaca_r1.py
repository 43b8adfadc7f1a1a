"""Reasoning tasks of Alpaca's schema: a prompt, and the answer for a verifier.

{"instruction": "...", "input": "...", "output": "..."}
"""

from __future__ import annotations

from ascend_run.text.samples import VerifiablePrompt

from . import DataHandler, Key, Record
from .alpaca import QUESTION, question


def convert(record: Record) -> VerifiablePrompt:
    """Return the prompt and the answer of a record."""
    return VerifiablePrompt(messages=question(record), answer=record.text("output"))


handler = DataHandler(
    name="alpaca-r1",
    summary="instruction and input as a prompt, with the answer for a verifier",
    sample=VerifiablePrompt,
    keys=(*QUESTION, Key("output", "the answer that a verifier compares with", required=True)),
    convert=convert,
)
