"""Conversations with known answers: prompts, what is computed of them, and what is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ascend_run.tools.chat.chat import Answer, Chat
from ascend_run.tools.chat.conversation import result_message, user_message
from ascend_run.tools.chat.prompts import MessageRefused
from tests.support.chats import CHATML

from .scripted import ADD, HELLO, TEMPLATE, ScriptedSession, scripted

CALL = {"name": "add", "arguments": {"a": 1}}
OTHER: dict[str, Any] = {"name": "hello", "arguments": {}}


def block(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def numbered(number: int, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def say(chat: Chat, text: str) -> Answer:
    return chat.answer(user_message(text))


def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    """Over turns with a system message, reasoning, calls of tools and their results; only tokens
    after the common prefix are computed."""
    answers = [
        "<think>\nhm\n</think>\n\nThe fox says hello.",
        f"I add.\n{block(CALL)}\n{block(OTHER)}",
        block(CALL),
        "seven eight",
        "nine",
    ]
    tools = [ADD, HELLO]
    chat, session = scripted(tmp_path, *answers, tools=tools, system="Be brief.")
    first, second = numbered(0, CALL), numbered(1, OTHER)
    third = numbered(2, CALL)
    results = [result_message(first, "3"), result_message(second, ""), result_message(third, "4")]
    say(chat, "What does the fox say?")
    calling = say(chat, "one two?")
    assert (calling.calls, calling.finish) == ((first, second), "tool_calls")
    assert chat.conversation.open_calls == [first, second]
    chat.conversation = chat.conversation.with_message(results[0])
    assert chat.conversation.open_calls == [second]
    assert chat.answer(results[1]).calls == (third,)
    last = chat.answer(results[2])
    assert (last.calls, last.finish, last.text) == ((), "stop", "seven eight")
    say(chat, "hello again")

    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does the fox say?"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "one two?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [first, second]},
        {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"},
        {"role": "tool", "name": "hello", "tool_call_id": "call00001", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [third]},
        {"role": "tool", "name": "add", "tool_call_id": "call00002", "content": "4"},
        {"role": "assistant", "content": "seven eight"},
        {"role": "user", "content": "hello again"},
    ]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = [
        theirs.apply_chat_template(
            messages[:count], tools=tools, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for count in (2, 4, 7, 9, 11)
    ]
    assert [[*prompt] for prompt in session.prompts] == expected


def num_common(ids: list[int], others: list[int]) -> int:
    count = 0
    while ids[count : count + 1] == others[count : count + 1] != []:
        count += 1
    return count


def test_only_what_a_turn_adds_is_computed(tmp_path: Path) -> None:
    answers = ["The fox", "says <think>a</think> hello", "then", "again"]
    chat, session = scripted(tmp_path, *answers, system="one")
    text: list[int] = []
    for said in ("What?", "is", "hello"):
        before = session.num_computed
        answer = say(chat, said)
        prompt, stored = [*session.prompts[-1]], text[:-1]
        cached = num_common(prompt[:-1], stored)
        assert (answer.prompt_tokens, answer.cached_tokens) == (len(prompt), cached)
        assert (cached > 0) == bool(text)
        new = [one.token for one in answer.emitted]
        assert session.num_computed - before == len(prompt) - cached + len(new) - 1
        text = [*prompt, *new]
    chat.conversation = type(chat.conversation)(system="two")
    assert say(chat, "What?").cached_tokens > 0, "what begins every prompt"


def texts_of(session: ScriptedSession) -> str:
    """The last prompt."""
    text: str = session._texts.tokenizer.decode(session.prompts[-1])
    return text


def rendered(*messages: str) -> str:
    """Of messages ``role: content``."""
    pairs = [message.split(": ", 1) for message in messages]
    turns = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in pairs]
    return "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("number", [0, 1, 2, None])
def test_a_message_comes_with_so_many_earlier_turns(tmp_path: Path, number: int | None) -> None:
    answers = ["a", "b", "c"]
    chat, session = scripted(
        tmp_path, *answers, template=CHATML, history_turns=number, system="two"
    )
    dropped = [say(chat, text).num_dropped for text in ("x", "y", "z")]
    history = ["user: x", "assistant: a", "user: y", "assistant: b"]
    kept = history if number is None else history[len(history) - 2 * number :]
    assert texts_of(session) == rendered("system: two", *kept, "user: z")
    assert dropped == [0, 0, 0], "they were to leave"


def test_the_oldest_turns_leave_when_the_text_is_full(tmp_path: Path) -> None:
    """The system message stays; an answer has room for a quarter of the longest text."""
    chat, session = scripted(
        tmp_path, *["hello"] * 4, template=CHATML, system="one", longest=64, max_new_tokens=100
    )
    found = [say(chat, f"{number} and then five").num_dropped for number in range(4)]
    assert found == [0, 0, 1, 1]
    last = [f"user: {number} and then five" for number in (2, 3)]
    assert texts_of(session) == rendered("system: one", last[0], "assistant: hello", last[1])
    assert len(chat.conversation.turns) == 2
    assert max(map(len, session.prompts)) <= 48


def test_a_message_that_is_too_long_changes_nothing(tmp_path: Path) -> None:
    chat, session = scripted(tmp_path, "a", "b", template=CHATML, longest=64, max_new_tokens=10)
    say(chat, "x")
    before = chat.conversation
    with pytest.raises(MessageRefused, match=r"makes a prompt of \d+ tokens .* text here has 64"):
        say(chat, "nine ten " * 40)
    assert chat.conversation is before
    say(chat, "y")
    assert texts_of(session) == rendered("user: x", "assistant: a", "user: y")


def test_an_answer_ends_where_the_longest_text_does(tmp_path: Path) -> None:
    chat, _ = scripted(tmp_path, "fox " * 60, template=CHATML, longest=40, max_new_tokens=100)
    answer = say(chat, "x")
    assert answer.finish == "length"
    assert answer.prompt_tokens + len(answer.emitted) == 40


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_an_interrupted_answer_stays_as_far_as_it_came(tmp_path: Path, num_tokens: int) -> None:
    chat, session = scripted(tmp_path, "abcdefg", "hello", template=CHATML)
    pieces: list[str] = []
    answer = chat.answer(
        user_message("x"), pieces.append, lambda: len("".join(pieces)) >= num_tokens
    )
    assert answer.finish == "interrupted"
    said = "".join(pieces)
    assert said == answer.text == "abcdefg"[: len(said)] != "abcdefg"
    following = say(chat, "y")
    assert following.text == "hello"
    assert texts_of(session) == rendered("user: x", f"assistant: {said}", "user: y")
    assert following.cached_tokens >= answer.prompt_tokens


def test_calls_are_text_without_tools_and_for_a_template_without_them(tmp_path: Path) -> None:
    plain, _ = scripted(tmp_path / "plain", block(CALL))
    answer = say(plain, "x")
    assert (answer.calls, answer.finish) == ((), "stop")
    source = TEMPLATE.replace("tool_calls", "other")
    chat, session = scripted(tmp_path / "other", block(CALL), "hello", template=source, tools=[ADD])
    (call,) = say(chat, "x").calls
    chat.answer(result_message(call, "3"))
    assert f"<|im_start|>assistant\n{block(CALL)}<|im_end|>" in texts_of(session)


def test_calls_are_withheld_from_what_is_shown(tmp_path: Path) -> None:
    answers = [f"I add.\n{block(CALL)}", "{no call}"]
    chat, _ = scripted(tmp_path, *answers, tools=[ADD])
    for answer, shown in zip(answers, ("I add.\n", "{no call}"), strict=True):
        pieces: list[str] = []
        assert chat.answer(user_message("x"), pieces.append).text == answer
        assert "".join(pieces) == shown


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """As in transformers, where a tokenizer has several."""
    templates = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": TEMPLATE},
    ]
    chat, session = scripted(tmp_path, "a", template=templates, tools=[ADD])
    say(chat, "x")
    message = {"role": "user", "content": "x"}
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [message], tools=[ADD], add_generation_prompt=True, return_dict=True
    )
    assert [*session.prompts[-1]] == theirs["input_ids"]


def test_without_a_template_the_text_goes_on_as_it_is_typed(tmp_path: Path) -> None:
    chat, session = scripted(tmp_path, "ello", " world", "c", template=None)
    for text in ("h", "the", "a"):
        say(chat, text)
    assert texts_of(session) == "hello\nthe world\na"


def test_a_template_that_refuses_changes_nothing(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ raise_exception('too short') if m.content | length < 3 }}"
        "{{ m.content }}{% endfor %}"
    )
    chat, session = scripted(tmp_path, "answer", template=source)
    with pytest.raises(MessageRefused, match="the chat template refuses it: too short"):
        say(chat, "x")
    assert chat.conversation.turns == ()
    say(chat, "long enough")
    assert texts_of(session) == "long enough"
