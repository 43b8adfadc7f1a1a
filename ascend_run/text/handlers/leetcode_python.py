"""Solutions of programming problems, as the dataset leetcode-solutions-python stores them.

    {"code_with_problem": "problem\\n```python\\n...\\n```", "code_only": "...",
     "explanation_only": "..."}

The problem ends where its code begins; the code and its explanation are the answer.
"""

from __future__ import annotations

from ascend_run.text.samples import Conversation

from . import DataHandler, Key, Record
from .alpaca import exchange


def convert(record: Record) -> Conversation:
    """Return the conversation of a record."""
    problem = record.text("code_with_problem").partition("```")[0].strip()
    answer = f"{record.text('code_only')}\n{record.text('explanation_only')}"
    return Conversation(messages=tuple(exchange(problem, answer)))


handler = DataHandler(
    name="leetcode-python",
    summary="programming problems with code and its explanation",
    sample=Conversation,
    keys=(
        Key("code_with_problem", "the problem, then its code", required=True),
        Key("code_only", "the code", required=True),
        Key("explanation_only", "the explanation of the code", required=True),
    ),
    convert=convert,
)
