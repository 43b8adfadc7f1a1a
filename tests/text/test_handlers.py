"""What each handler makes of its schema, by hand; and handlers of third parties."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_run.text.handlers.loading import handler_names, load_handler
from ascend_run.text.reading import SampleReader, sample_reader
from ascend_run.text.samples import (
    Conversation,
    Preference,
    ProcessReward,
    Prompt,
    Sample,
    Text,
    VerifiablePrompt,
)
from tests.support.chats import write_lines


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "S"}
SHAREGPT = [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]
TURNS = {
    f"turn_{n}": {
        "Human": f"<|Human|>: U{n}<eoh>\n",
        "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
        "Commands": "<|Commands|>: None<eoc>\n",
        "Tool Responses": "<|Results|>: None<eor>\n",
        "MOSS": f"<|MOSS|>: A{n} <b>\nand more<eom>\n",
    }
    for n in range(1, 12)
}
SAMPLES: dict[str, tuple[dict[str, Any], Sample]] = {
    "text": ({"text": "a\nb"}, Text(text="a\nb")),
    "alpaca": (
        {"instruction": "U2", "input": "more", "output": "A2", "system": "S",
         "history": [["U1", "A1"]], "tools": '[{"name": "add"}]',
         "documents": [{"title": "T", "text": "D"}]},
        Conversation(
            messages=(SYSTEM, user("U1"), assistant("A1"), user("U2\nmore"), assistant("A2")),
            tools=[{"name": "add"}],
            documents=[{"title": "T", "text": "D"}],
        ),
    ),
    "messages of a call alone": (
        {"messages": [user("U"), {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
        Conversation(
            messages=(
                user("U"),
                {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
            )
        ),
    ),
    "alpaca-pairwise": (
        {"instruction": "U", "chosen": "good", "rejected": "bad"},
        Preference(prompt=(user("U"),), chosen=assistant("good"), rejected=assistant("bad")),
    ),
    "sharegpt-pairwise": (
        {"conversations": SHAREGPT[:1], "system": "S", "chosen": SHAREGPT[1],
         "rejected": {"role": "assistant", "content": "bad"}},
        Preference(prompt=(SYSTEM, user("U")), chosen=assistant("A"), rejected=assistant("bad")),
    ),
    "preference": (
        {"prompt": "U", "chosen": "good", "rejected": "bad"},
        Preference(prompt=(user("U"),), chosen=assistant("good"), rejected=assistant("bad")),
    ),
    "preference of messages": (
        {"chosen": [SYSTEM, user("U"), assistant("good")],
         "rejected": [SYSTEM, user("U"), assistant("bad")], "tools": [{"name": "add"}]},
        Preference(prompt=(SYSTEM, user("U")), chosen=assistant("good"),
                   rejected=assistant("bad"), tools=[{"name": "add"}]),
    ),
    "process-reward": (
        {"input": "Q s1 * s2 *", "value": ["+", "-"]},
        ProcessReward(text="Q s1 * s2 *", rewards=("+", "-")),
    ),
    "process-reward with a question": (
        {"instruction": "U", "system": "S", "input": "s1 *", "value": ["+"]},
        ProcessReward(text="s1 *", prompt=(SYSTEM, user("U")), rewards=("+",)),
    ),
    "alpaca-r1": (
        {"instruction": "U", "output": "A"},
        VerifiablePrompt(messages=(user("U"),), answer="A"),
    ),
    "sharegpt-r1": (
        {"conversations": SHAREGPT, "system": "S"},
        VerifiablePrompt(messages=(SYSTEM, user("U")), answer="A"),
    ),
    "prompt": ({"instruction": "U", "input": ""}, Prompt(messages=(user("U"),))),
    "belle": (
        {"instruction": "Human:U1\nmore: yes\nAssistant: A1 \nHuman\uff1aU2\nAssistant:\n",
         "input": "", "output": "A2\n"},
        Conversation(
            messages=(user("U1\nmore: yes"), assistant("A1"), user("U2"), assistant("A2"))
        ),
    ),
    "leetcode-python": (
        {"code_with_problem": " P\nQ \n```python\nc\n```", "code_only": "```python\nc\n```",
         "explanation_only": "E"},
        Conversation(messages=(user("P\nQ"), assistant("```python\nc\n```\nE"))),
    ),
    "stack-overflow": (
        {"title": "T", "question_body": "Q", "answer_body": "A"},
        Text(text="In python, T\n### Question:\nQ\n### Response:\nA\n"),
    ),
    "moss": (
        {"meta_instruction": "S\n", "num_turns": 11, "chat": TURNS},
        Conversation(
            messages=(SYSTEM, *(
                message for n in range(1, 12)
                for message in (user(f"U{n}"), assistant(f"A{n} <b>\nand more"))
            ))
        ),
    ),
}  # fmt: skip


def read_one(folder: Path, handler: str, record: Any) -> Sample:
    found = load_handler(handler)
    path = write_lines(folder / "a.jsonl", [record])
    ((_, sample),) = sample_reader(handler, (), found.sample).read([path])
    return sample


@pytest.mark.parametrize("handler", SAMPLES)
def test_a_record_is_the_sample_of_its_schema(tmp_path: Path, handler: str) -> None:
    record, sample = SAMPLES[handler]
    assert read_one(tmp_path, handler.partition(" ")[0], record) == sample


def test_an_instruction_without_speakers_is_one_question(tmp_path: Path) -> None:
    record = {"instruction": "Say Human: or\nHuman: x", "input": "more", "output": "A"}
    assert read_one(tmp_path, "belle", record) == Conversation(
        messages=(user("Say Human: or\nHuman: x\nmore"), assistant("A"))
    )


@pytest.mark.parametrize("name", handler_names())
def test_a_handler_is_of_its_name_and_lists_what_it_reads(name: str) -> None:
    handler = load_handler(name)
    record: Any = dict.fromkeys(key.default or key.name for key in handler.keys if key.required)
    assert (handler.name, bool(handler.summary)) == (name, True)
    if name != "chat":
        assert record
        assert handler.lacking(frozenset(record), {}) is None
        assert handler.lacking(frozenset(), {}) is not None


WRONG: dict[str, tuple[str, Any, str]] = {
    "chosen": ("alpaca-pairwise", {"instruction": "U", "rejected": "b"}, "lacks 'chosen'"),
    "rejected": (
        "sharegpt-pairwise",
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[0]},
        "'rejected' is not of the assistant",
    ),
    "pair": (
        "sharegpt-pairwise",
        {"conversations": SHAREGPT[:1], "chosen": "x", "rejected": "y"},
        "'chosen' must be an object with 'from' and 'value'",
    ),
    "rating": ("process-reward", {"input": "x", "value": [1]}, "'value' must be a list of rat"),
    "ratings": ("process-reward", {"input": "x", "value": []}, "'value' must be a list of rat"),
    "no ratings": ("process-reward", {"input": "x"}, "lacks 'value'; its keys: 'input'"),
    "question": (
        "process-reward",
        {"input": "x", "value": ["+"], "system": "S"},
        "has 'system' without 'instruction', the question",
    ),
    "answer": ("sharegpt-r1", {"conversations": SHAREGPT[:1]}, "must end with an answer"),
    "belle": ("belle", {"instruction": "Human: a\nAssistant: b", "output": "c"}, "must end with"),
    "belle in a row": (
        "belle",
        {"instruction": "Human: a\nHuman: b\nAssistant:", "output": "c"},
        "'instruction' has two turns of one speaker in a row",
    ),
    "moss": ("moss", {"chat": {"turn_2": {}}}, "turn_1 of 'chat' must be an object"),
    "moss text": ("moss", {"chat": {"turn_1": {"Human": "x"}}}, "must have a string as 'MOSS'"),
    "chat": ("moss", {"chat": []}, "'chat' must be an object of turns"),
    "half a character": (
        "sharegpt",
        {"conversations": json.dumps([{"from": "human", "value": "\ud800"}])},
        "'conversations' has \\ud800 without the other half",
    ),
    "broken tools": (
        "sharegpt",
        {"conversations": SHAREGPT, "tools": '[{"name": "add"'},
        "'tools' must be a list of tools, or JSON text of one, found text that is no JSON",
    ),
    "tools of an object": (
        "alpaca",
        {"instruction": "U", "output": "A", "tools": {"name": "add"}},
        "'tools' must be a list of tools, or JSON text of one, found dict",
    ),
    "tools of a pair": (
        "sharegpt-pairwise",
        {
            "conversations": SHAREGPT[:1],
            "chosen": SHAREGPT[1],
            "rejected": SHAREGPT[1],
            "tools": "add",
        },
        "'tools' must be a list of tools, or JSON text of one, found text that is no JSON",
    ),
    "text": ("text", {"text": None}, "'text' must be a string, found NoneType"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_record_of_another_schema_is_named(tmp_path: Path, kind: str) -> None:
    handler, record, expected = WRONG[kind]
    path = write_lines(tmp_path / "a.jsonl", [record])
    (problem,) = SampleReader(load_handler(handler)).problems([path])
    assert problem.startswith(f"{path}:1: ")
    assert expected in problem


_THIRD_PARTY = """
from ascend_run.text.handlers import DataHandler, Key
from ascend_run.text.samples import Conversation

def convert(record):
    pair = record.listed("pair", "two texts")
    roles = ("user", "assistant")
    return Conversation(messages=tuple(
        {"role": role, "content": text} for role, text in zip(roles, pair)
    ))

handler = DataHandler(name="pairs", summary="two texts", sample=Conversation,
                      keys=(Key("pair", "the two", required=True),), convert=convert)
"""
_LOAD = """
import json, sys
from ascend_run.plugin_api import AscendRunError
from ascend_run.text.handlers.loading import handler_names
from ascend_run.text.reading import sample_reader
from ascend_run.text.samples import Conversation
assert "pairs" in handler_names() and "theirs" not in sys.modules
try:
    reader = sample_reader(sys.argv[1], (), Conversation)
    print(json.dumps([[s.messages[1]["content"] for _, s in reader.read(sys.argv[2:])], ""]))
except AscendRunError as error:
    print(json.dumps([None, str(error)]))
"""


def test_a_handler_of_a_third_party_is_found_by_its_entry_point(tmp_path: Path) -> None:
    for number, points in enumerate(
        (
            (
                "pairs = theirs:handler\nbroken = missing:handler\nnone = json:dumps\n"
                "twice = theirs:handler\nother = theirs:handler"
            ),
            "twice = theirs:handler",
        )
    ):
        info = tmp_path / f"third_{number}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: third-{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[ascend_run.data_handlers]\n{points}\n")
    (tmp_path / "theirs.py").write_text(_THIRD_PARTY)
    path = write_lines(tmp_path / "a.jsonl", [{"pair": ["a", "b"]}])

    def told(name: str) -> Any:
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{_LOAD}"
        done = subprocess.run(
            [sys.executable, "-c", program, name, path],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    assert told("pairs") == [["b"], ""]
    assert "fails to import missing:handler: ModuleNotFoundError" in told("broken")[1]
    assert "'none' of third-0: json:dumps is not a DataHandler" in told("none")[1]
    assert "'other' of third-0: theirs:handler is not a DataHandler of that" in told("other")[1]
    assert "provided more than once, by third-0 (theirs:handler) and third-1" in told("twice")[1]
    assert "makes Text samples, and Conversation samples are needed" in told("text")[1]
