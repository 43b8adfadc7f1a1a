"""Questions about Python with an answer, as documents for pre-training.

    {"title": "...", "question_body": "...", "answer_body": "..."}

A document has the title, the question and the answer, in the words of MindSpeed-LLM.
"""

from __future__ import annotations

from ascend_run.text.samples import Text

from . import DataHandler, Key, Record


def convert(record: Record) -> Text:
    """Return the document of a record."""
    title, question, answer = map(record.text, ("title", "question_body", "answer_body"))
    parts = (f"In python, {title}", "### Question:", question, "### Response:", answer, "")
    return Text(text="\n".join(parts))


handler = DataHandler(
    name="stack-overflow",
    summary="questions about Python with an answer, for pre-training",
    sample=Text,
    keys=(
        Key("title", "the title of the question", required=True),
        Key("question_body", "the question", required=True),
        Key("answer_body", "the answer", required=True),
    ),
    convert=convert,
)
