"""Reasoning tasks of ShareGPT's schema: a prompt, and the last answer for a verifier.

{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
"""

from __future__ import annotations

from ascend_run.text.samples import VerifiablePrompt

from . import DataHandler, MalformedRecord, Record, sharegpt


def convert(record: Record) -> VerifiablePrompt:
    """Return the prompt and the answer of a record."""
    conversation = sharegpt.convert(record)
    *prompt, last = conversation.messages
    if last["role"] != "assistant" or not last["content"]:
        raise MalformedRecord(
            f"{record.own('conversations')!r} must end with an answer of the assistant"
        )
    return VerifiablePrompt(
        messages=tuple(prompt),
        answer=last["content"],
        tools=conversation.tools,
        documents=conversation.documents,
    )


handler = DataHandler(
    name="sharegpt-r1",
    summary="conversations as a prompt, with the last answer for a verifier",
    sample=VerifiablePrompt,
    keys=sharegpt.handler.keys,
    convert=convert,
)
