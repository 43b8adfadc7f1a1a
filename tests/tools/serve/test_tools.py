"""Tools of a chat, by OpenAI's own client: their definitions, calls and results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .serving import SECONDS, Served

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"a": 1, "b": "zwei"}}
QUESTION: Any = [{"role": "user", "content": "1 + 2?"}]
TEXTS = {
    "json": ("", json.dumps(CALL)),
    "blocks": ("I add. ", f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2),
    "text": ("I < add {}", ""),
    "unknown": (json.dumps({**CALL, "name": "other"}), ""),
}


@pytest.fixture(scope="module")
def client(calling: Served) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{calling.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=SECONDS, max_retries=0) as client:
        yield client


def says(calling: Served, text: str) -> int:
    """Let the model say this; returns the number of its tokens."""
    calling.session.says = calling.texts.tokenizer.backend.encode(text).ids
    return len(calling.session.says)


@pytest.mark.parametrize("name", TEXTS)
def test_calls_of_an_answer_have_fields_of_their_own(
    name: str, client: openai.OpenAI, calling: Served
) -> None:
    """Whole and streamed; an answer without calls is text."""
    content, calls = TEXTS[name]
    fields: Any = {"model": "tiny", "messages": QUESTION, "tools": [ADD]}
    fields["max_tokens"] = says(calling, content + calls)
    (choice,) = client.chat.completions.create(**fields).choices
    message = choice.message
    found = message.tool_calls or []
    assert len(found) == {"json": 1, "blocks": 2}.get(name, 0)
    assert choice.finish_reason == ("tool_calls" if found else "length")
    assert message.content == (content.strip() or None)
    for call in found:
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == CALL["arguments"]
    assert len({call.id for call in found}) == len(found)

    *parts, last = (
        part.choices[0] for part in client.chat.completions.create(**fields, stream=True)
    )
    assert last.finish_reason == choice.finish_reason
    deltas = [part.delta for part in (*parts, last)]
    assert "".join(delta.content or "" for delta in deltas) == content
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in streamed] == [*range(len(found))]
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in found
    ]
    assert not any(delta.tool_calls for delta in deltas[:-1])


def test_an_answer_comes_back_with_results(client: openai.OpenAI, calling: Served) -> None:
    fields: Any = {"model": "tiny", "tools": [ADD]}
    number = says(calling, json.dumps(CALL))
    first = client.chat.completions.create(**fields, messages=QUESTION, max_tokens=number)
    message = first.choices[0].message
    (call,) = message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    client.chat.completions.create(
        **fields, messages=[*QUESTION, message, result], max_tokens=1, tool_choice="auto"
    )
    backend = calling.texts.tokenizer.backend
    assert backend.decode(calling.session.submitted[-1].prompt) == (
        f"add\nuser: 1 + 2?\nassistant: [{call.id} {json.dumps(CALL)}]\n"
        f"tool: 3 of add {call.id}\nassistant:"
    )


def test_without_a_choice_tools_are_not_rendered(client: openai.OpenAI, calling: Served) -> None:
    fields: Any = {"model": "tiny", "messages": QUESTION, "tools": [ADD], "tool_choice": "none"}
    number = says(calling, json.dumps(CALL))
    (choice,) = client.chat.completions.create(**fields, max_tokens=number).choices
    assert (choice.message.tool_calls, choice.message.content) == (None, json.dumps(CALL))
    prompt = calling.texts.tokenizer.backend.decode(calling.session.submitted[-1].prompt)
    assert prompt == "user: 1 + 2?\nassistant:"
