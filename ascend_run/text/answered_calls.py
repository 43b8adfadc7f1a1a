"""Calls of tools in the answer of a model. No torch.

Forms: JSON of ``{"name": ..., "arguments": {...}}``, or a list of these (Mistral; with
``parameters`` instead of ``arguments``, Llama 3); or such JSON between ``<tool_call>`` and
``</tool_call>`` (Hermes 2 Pro, Qwen).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

import attrs

from .tool_calls import calls_of_text

_BEGIN: Final = "<tool_call>"
_BLOCK: Final = re.compile(rf"{_BEGIN}\s*(.*?)\s*</tool_call>", re.DOTALL)


@attrs.frozen
class AnsweredCalls:
    """Calls, and the text before them."""

    content: str
    calls: tuple[dict[str, Any], ...]
    """In the form of ``tool_calls`` of a message, without ids."""


def calls_of_answer(text: str, names: Collection[str]) -> AnsweredCalls | None:
    """Return the calls in an answer.

    Args:
        names: Those of the tools; a call of another one is text.

    Returns:
        None if the answer is text alone.
    """
    blocks = _BLOCK.findall(text)
    found = [_calls(block) for block in blocks or [text.strip()]]
    calls = tuple(call for group in found for call in group or ())
    if None in found or not all(call["function"]["name"] in names for call in calls):
        return None
    return AnsweredCalls(text[: text.index(_BEGIN)].strip() if blocks else "", calls)


def _calls(text: str) -> list[dict[str, Any]] | None:
    if (calls := calls_of_text(text)) is not None:
        return calls
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or "parameters" not in call:
        return None
    renamed = {"arguments" if key == "parameters" else key: one for key, one in call.items()}
    return calls_of_text(json.dumps(renamed))


class TextBeforeCalls:
    """Passes an answer on as it comes, but for what may be calls."""

    def __init__(self) -> None:
        self._text = ""
        self._num_passed = 0

    def push(self, text: str) -> str:
        """Take a piece of the answer; return the text that is no call for certain."""
        self._text += text
        return self._passed(self._end())

    def finish(self) -> str:
        """Return what was withheld, if the answer has no calls."""
        return self._passed(len(self._text))

    def _end(self) -> int:
        """Return where the text begins that may be a call."""
        if self._text.lstrip()[:1] in ("", "{", "["):
            return 0
        if (at := self._text.find(_BEGIN)) >= 0:
            return at
        at = self._text.rfind(_BEGIN[0])
        return at if at >= 0 and _BEGIN.startswith(self._text[at:]) else len(self._text)

    def _passed(self, end: int) -> str:
        start, self._num_passed = self._num_passed, max(self._num_passed, end)
        return self._text[start:end]
