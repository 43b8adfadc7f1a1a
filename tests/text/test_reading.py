"""Samples of files, through the handlers of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.text.reading import sample_reader
from ascend_run.text.samples import Conversation
from tests.support.chats import LONG, SHORT, write_lines


def read_conversations(
    path: str, handler: str = "chat", *map_keys: str
) -> tuple[list[tuple[str, Conversation]], list[str]]:
    """Return the conversations of a file with their sources, and the problems."""
    reader = sample_reader(handler, map_keys, Conversation)
    found = []
    try:
        for source, sample in reader.conversations([path]):
            found.append((source, sample))
    except DataError as error:
        return found, list(error.problems)
    return found, []


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": LONG}, LONG),
        (
            {
                "system": "The fox says hello.",
                "conversations": [
                    {"from": role, "value": message["content"]}
                    for role, message in zip(
                        ("human", "gpt", "human", "gpt"), LONG[1:], strict=True
                    )
                ],
            },
            LONG,
        ),
        (
            {
                "system": "The fox says hello.",
                "instruction": "hello again",
                "input": "",
                "output": "six seven",
                "history": [["one two?", "three four, and then five"]],
            },
            LONG,
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            [
                {"role": "user", "content": "Add.\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
    ],
    ids=["messages", "sharegpt", "alpaca with history", "alpaca with input"],
)
def test_every_form_gives_the_same_messages(
    tmp_path: Path, record: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    found, wrong = read_conversations(write_lines(tmp_path / "one.jsonl", [record, "  "]))
    assert wrong == []
    ((source, conversation),) = found
    assert [dict(message) for message in conversation.messages] == messages
    assert source == f"{tmp_path / 'one.jsonl'}:1"


def test_tools_and_further_keys_reach_the_template(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    record = {"messages": [SHORT[0], call], "tools": [{"name": "add"}]}
    ((_, conversation),), wrong = read_conversations(write_lines(tmp_path / "one.jsonl", [record]))
    assert wrong == []
    assert conversation.tools == [{"name": "add"}]
    assert dict(conversation.messages[1]) == call


BAD_LINES: dict[str, tuple[Any, str]] = {
    "no json": ('{"messages": [', "not JSON: Expecting value at column 15"),
    "no object": ("[1]", "expected a JSON object, found list"),
    "no known key": ({"text": "x"}, "its keys: 'text'"),
    "no messages": ({"messages": []}, "'messages' must be a list of messages"),
    "no output": ({"instruction": "x"}, "lacks 'output'"),
    "no text": ({"instruction": "x", "output": 3}, "'output' must be a string, found int"),
    "role": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "message 1 has the role 'narrator'; expected one of system, user, human",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "message 1 lacks 'role'"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 lacks 'content'"),
    "parts": ({"messages": [{"role": "user", "content": [1]}]}, "must have a string as 'content'"),
    "history": ({"instruction": "x", "output": "y", "history": [["a"]]}, "list of pairs"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, kind: str) -> None:
    line, expected = BAD_LINES[kind]
    path = write_lines(tmp_path / "bad.jsonl", [{"messages": SHORT}, line])
    (problem,) = read_conversations(path)[1]
    assert problem.startswith(f"{path}:2: ")
    assert expected in problem


def test_of_many_bad_lines_the_first_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    found, wrong = read_conversations(write_lines(tmp_path / "bad.jsonl", ["x"] * 50))
    assert found == []
    assert len(wrong) == 21
    assert wrong[-1].endswith("30 more lines cannot be used")


SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "What is 1 + 1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ],
    "system": "Use the tools.",
    "tools": '[{"name": "add"}]',
}


def test_tools_and_their_results_are_messages(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [SHAREGPT])
    ((_, conversation),), wrong = read_conversations(path, "sharegpt")
    assert wrong == []
    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]
    call = {"name": "add", "arguments": {"a": 1, "b": 1}}
    assert conversation.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert conversation.messages[3]["content"] == "2"


def test_a_table_gives_the_conversations_of_its_lines(tmp_path: Path) -> None:
    records = [SHAREGPT, {"conversations": SHAREGPT["conversations"][:1] * 2}]
    plain = write_lines(tmp_path / "a.jsonl", records)
    pa.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    text = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in SHAREGPT.items()}]
    pa.csv.write_csv(pa.Table.from_pylist(text), tmp_path / "a.csv")
    wanted = [conversation for _, conversation in read_conversations(plain, "sharegpt")[0]]
    found, wrong = read_conversations(str(tmp_path / "a.parquet"), "sharegpt")
    assert (wrong, [conversation for _, conversation in found]) == ([], wanted)
    found, wrong = read_conversations(str(tmp_path / "a.csv"), "sharegpt")
    assert (wrong, [conversation for _, conversation in found]) == ([], wanted[:1])


def test_keys_and_roles_are_mapped(tmp_path: Path) -> None:
    record = {"dialog": [{"who": "kunde", "says": "a"}, {"who": "gpt", "says": "b"}], "rule": "c"}
    path = write_lines(tmp_path / "a.jsonl", [record])
    pairs = ("conversations=dialog", "system=rule", "role_tag=who", "content_tag=says")
    whole = {
        **dict(pair.split("=") for pair in pairs[:2]),
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "kunde"},
    }
    for given in ((*pairs, "user_tag=kunde"), (json.dumps(whole),)):
        ((_, conversation),), wrong = read_conversations(path, "sharegpt", *given)
        assert wrong == []
        assert [(m["role"], m["content"]) for m in conversation.messages] == [
            ("system", "c"), ("user", "a"), ("assistant", "b"),
        ]  # fmt: skip
    (problem,) = read_conversations(path, "sharegpt", *pairs)[1]
    assert problem.startswith(f"{path}:1: message 1 has the role 'kunde'; expected one of system")
    other = write_lines(tmp_path / "b.jsonl", [{"question": "a", "answer": "b"}])
    ((_, conversation),), _ = read_conversations(
        other, "alpaca", "instruction=question", "output=answer"
    )
    assert [m["content"] for m in conversation.messages] == ["a", "b"]


def test_a_table_of_another_schema_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.Table.from_pylist([{"text": "x", "n": 1}] * 50), path)
    (problem,) = read_conversations(str(path), "alpaca", "instruction=question")[1]
    assert problem == (
        f"{path} has another schema: its columns are 'n', 'text'; the handler 'alpaca' needs "
        "'question', 'output'; name another handler, or map the keys"
    )
    (problem,) = read_conversations(str(path))[1]
    assert "needs 'messages' or 'conversations' or 'instruction', 'output'" in problem


@pytest.mark.parametrize(
    ("handler", "given", "expected"),
    [
        ("sharegtp", (), "there is no data handler 'sharegtp'; installed are alpaca, "),
        ("alpaca", ("question",), "'question': expected KEY=NAME"),
        ("alpaca", ("question=x",), "'question' is no key of the handler 'alpaca'; its keys are"),
        ("alpaca", ("output=",), "'output' is mapped to ''"),
        ("alpaca", ('{"output": 3}',), "'output' is mapped to 3"),
        ("alpaca", ('{"output"',), "is not a JSON object"),
        ("sharegpt", ('{"tags": 1}',), "'tags' must be a JSON object"),
        ("chat", ("output=x",), "'output' is no key of the handler 'chat'"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "",
)
def test_a_bad_handler_or_mapping_is_refused(
    handler: str, given: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sample_reader(handler, given, Conversation)
    assert expected in str(caught.value)
    assert len(caught.value.problems) <= 1
