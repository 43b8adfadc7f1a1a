"""Documents for pre-training.

{"text": "..."}
"""

from __future__ import annotations

from ascend_run.text.samples import Text

from . import DataHandler, Key, Record


def convert(record: Record) -> Text:
    """Return the document of a record."""
    return Text(text=record.text("text"))


handler = DataHandler(
    name="text",
    summary="documents for pre-training",
    sample=Text,
    keys=(Key("text", "the document", required=True),),
    convert=convert,
)
