"""Answers on the standard output, as text or as JSON; notes on the other one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import click

from ascend_run.tools.generate.answering import token_logprobs
from ascend_run.tools.generate.printing import logprob_records
from ascend_run.tools.generate.texts import Texts

from .chat import Answer
from .conversation import name_of


class Printer(Protocol):
    """Prints what comes of each message."""

    def add(self, text: str) -> None:
        """Take a piece of an answer."""

    def end(self, said: str, answer: Answer) -> None:
        """Take a complete answer, after its pieces."""

    def refuse(self, said: str, why: str) -> None:
        """Take a message that is not answered."""


def note(text: str) -> None:
    """Print what is no answer."""
    click.echo(text, err=True)


class TextPrinter:
    """Prints answers as they come, and calls of tools in brackets, each on a line."""

    def __init__(self) -> None:
        self._is_within = False
        """Whether a line has begun."""

    def add(self, text: str) -> None:
        if text:
            click.echo(text, nl=False)  # which flushes
            self._is_within = not text.endswith("\n")

    def end(self, said: str, answer: Answer) -> None:
        lines = [_shown(call) for call in answer.calls]
        if self._is_within or not (answer.text or lines):
            lines.insert(0, "")
        for line in lines:
            click.echo(line)
        self._is_within = False

    def refuse(self, said: str, why: str) -> None:
        note(f"not answered: {why}")


class JsonPrinter:
    """Prints an object for each message.

    Args:
        texts: Decodes the tokens of log-probabilities.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def add(self, text: str) -> None:
        pass

    def end(self, said: str, answer: Answer) -> None:
        record: dict[str, Any] = {
            "message": said,
            "text": answer.text,
            "ids": [one.token for one in answer.emitted],
            "finish": answer.finish,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "new_tokens": len(answer.emitted),
        }
        if answer.calls:
            record["tool_calls"] = answer.calls
        if (logprobs := token_logprobs(answer.emitted, self._texts)) is not None:
            record["logprobs"] = logprob_records(logprobs)
        click.echo(json.dumps(record, ensure_ascii=False))

    def refuse(self, said: str, why: str) -> None:
        click.echo(json.dumps({"message": said, "error": why}))  # escapes what is no text


def _shown(call: Mapping[str, Any]) -> str:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return f"[call] {name_of(call)} {arguments}"
