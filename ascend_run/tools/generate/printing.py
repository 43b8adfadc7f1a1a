"""Answers on the standard output. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .answering import Answer, Logprobs, TokenLogprob


class TextPrinter:
    """Prints prompts and their answers in order, each as far as it has come."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._waiting = [*prompts]
        """Of each prompt that is not complete: what is to print."""
        self._num_done = 0

    def add(self, index: int, text: str) -> None:
        """Take a piece of the answer to a prompt; print it if the ones before are complete."""
        self._waiting[index] += text
        if index == self._num_done:
            self._print()

    def end(self) -> None:
        """Note that the first of the prompts left is complete."""
        self._print()
        click.echo()
        self._num_done += 1

    def _print(self) -> None:
        text, self._waiting[self._num_done] = self._waiting[self._num_done], ""
        click.echo(text, nl=False)  # which flushes


def as_record(answer: Answer) -> str:
    """Return an answer as one line of JSON."""
    record: dict[str, Any] = {
        "prompt": answer.prompt,
        "text": answer.text,
        "ids": answer.ids,
        "finish": answer.finish.value,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
    }
    if answer.logprobs is not None:
        record["logprobs"] = logprob_records(answer.logprobs)
    if answer.score is not None:
        record["score"] = answer.score
    return json.dumps(record, ensure_ascii=False)


def logprob_records(logprobs: Logprobs) -> list[dict[str, Any]]:
    """Return log-probabilities as JSON values."""
    return [{**_fields(one), "top": [_fields(other) for other in top]} for one, top in logprobs]


def _fields(one: TokenLogprob) -> dict[str, Any]:
    return {"id": one.id, "token": one.token, "logprob": one.logprob}
