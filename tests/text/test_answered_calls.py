"""Calls in answers, in the forms of several models, whole and as they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ascend_run.text.answered_calls import AnsweredCalls, TextBeforeCalls, calls_of_answer

ADD = {"name": "add", "arguments": {"a": 1, "b": [2, "drei"]}}
HELLO: dict[str, Any] = {"name": "hello", "arguments": {}}
LLAMA = {"name": "add", "parameters": ADD["arguments"]}
NAMES = {"add", "hello"}


def block(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (json.dumps(ADD), "", [ADD]),
        (f" \n{json.dumps([ADD, HELLO], indent=1)}\n", "", [ADD, HELLO]),
        (json.dumps(LLAMA), "", [ADD]),
        (json.dumps({**ADD, "arguments": json.dumps(ADD["arguments"])}), "", [ADD]),
        (block(ADD), "", [ADD]),
        (
            f"<think>\nso\n</think>\n\n{block(ADD)}\n{block(HELLO)}",
            "<think>\nso\n</think>",
            [ADD, HELLO],
        ),
    ],
    ids=["json", "list", "parameters", "text", "block", "blocks"],
)
def test_calls_are_found(text: str, content: str, expected: list[Any]) -> None:
    calls = tuple({"type": "function", "function": function} for function in expected)
    assert calls_of_answer(text, NAMES) == AnsweredCalls(content, calls)
    for pieces in (text, [text]):
        passing = TextBeforeCalls()
        assert "".join(map(passing.push, pieces)).rstrip() == content


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        "{",
        '{"name": "Ada", "born": 1815}',
        json.dumps({"name": "other", "arguments": {}}),
        json.dumps([ADD, {"name": "other", "arguments": {}}]),
        json.dumps({"name": ["add"], "parameters": {}}),
        f"{block(ADD)}<tool_call>{{</tool_call>",
        f"a < b <tool{block(ADD)[:30]}",
        "[" * 5000,
    ],
)
def test_other_answers_are_text(text: str) -> None:
    assert calls_of_answer(text, NAMES) is None
    for pieces in (text, [text]):
        passing = TextBeforeCalls()
        assert "".join([*map(passing.push, pieces), passing.finish()]) == text


def test_text_is_passed_on_up_to_what_may_be_a_call() -> None:
    passing = TextBeforeCalls()
    found = [passing.push(piece) for piece in ("a", " <to", "ol> <", "tool_call", "> b", "c")]
    assert found == ["a", " ", "<tool> ", "", "", ""]
    assert passing.finish() == "<tool_call> bc"
