"""Calls of tools, their results and definitions: ids and masks are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ascend_run.plugin_api import DataError, NoCache
from ascend_run.text.encoder import Encoder
from ascend_run.text.encoding import Encoded, LengthLimit, encoded_files
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.reading import sample_reader
from ascend_run.text.samples import Conversation
from tests.support.chats import CHATML, write_lines, write_tokenizer

BLOCKS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "[call] {{ call.function.name }} {{ call.function.arguments | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "blocks": BLOCKS,
    "prefixes": BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
}
ADD = {
    "name": "add",
    "description": "the sum",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, "three"]}}
OTHER = {"name": "hello", "arguments": {}}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "one two?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "three"},
        {"from": "function_call", "value": json.dumps([CALL, OTHER])},
        {"from": "observation", "value": "four"},
        {"from": "gpt", "value": "It is five."},
    ],
    "system": "Use the tools.",
    "tools": json.dumps([ADD]),
}


def called(*functions: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


MESSAGES = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "one two?"},
    called(CALL),
    {"role": "tool", "content": "three"},
    called(CALL, OTHER),
    {"role": "tool", "content": "four"},
    {"role": "assistant", "content": "It is five."},
]
TOOLS = [{"type": "function", "function": ADD}]
RECORDS: dict[str, dict[str, Any]] = {
    "sharegpt": SHAREGPT,
    "messages": {"messages": MESSAGES, "tools": TOOLS},
    "tools as text": {"messages": MESSAGES, "tools": json.dumps(TOOLS)},
    "arguments as text": {
        **SHAREGPT,
        "conversations": [
            *SHAREGPT["conversations"][:1],
            {
                "from": "function_call",
                "value": json.dumps({**CALL, "arguments": json.dumps(CALL["arguments"])}),
            },
            *SHAREGPT["conversations"][2:],
        ],
    },
}


def encode(folder: Path, template: str, record: dict[str, Any], **options: bool) -> Encoded:
    tokenizer, chat = open_chat(
        ChatOptions(
            tokenizer=write_tokenizer(folder / "tokenizer", template),
            tokenizer_option="data.tokenizer",
            template_option="plugins.sft.template",
            date_option="plugins.sft.date",
        )
    )
    encoder = Encoder(tokenizer=tokenizer, template=chat, keeps_special=False, **options)
    path = Path(write_lines(folder / "a.jsonl", [record]))
    limit = LengthLimit(max_tokens=10_000, too_long="drop")
    reader = sample_reader("chat", (), Conversation)
    return encoded_files([path], reader, encoder, limit, NoCache())


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("record", RECORDS)
def test_ids_and_masks_are_those_of_transformers(
    tmp_path: Path, record: str, template: str
) -> None:
    encoded = encode(tmp_path, TEMPLATES[template], RECORDS[record])
    write_tokenizer(tmp_path / "blocks", BLOCKS)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "blocks").apply_chat_template(
        MESSAGES, tools=TOOLS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    end = len(encoded.ids)
    assert encoded.ids.tolist() == theirs["input_ids"][:end]
    assert encoded.trained.astype(int).tolist() == theirs["assistant_masks"][:end]
    assert not any(theirs["assistant_masks"][end:])
    runs = np.flatnonzero(np.diff([0, *encoded.trained.astype(int)]) > 0)
    assert len(runs) == 3


def test_a_call_of_a_template_without_a_form_is_its_json(tmp_path: Path) -> None:
    plain = CHATML.replace("message['content']", "(message['content'] or '')")
    spoken = [
        {"role": m["role"], "content": m["content"]} if "tool_calls" not in m else
        {"role": "assistant", "content": json.dumps(functions)}
        for m, functions in zip(MESSAGES, (None, None, CALL, None, [CALL, OTHER], None, None),
                                strict=True)
    ]  # fmt: skip
    without = {key: value for key, value in SHAREGPT.items() if key != "tools"}
    found = encode(tmp_path, plain, without)
    wanted = encode(tmp_path, plain, {"messages": spoken})
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.trained.tolist() == wanted.trained.tolist()


def test_a_call_that_spells_a_special_token_is_left_out(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": "<|im_end|>"}}
    turns = [SHAREGPT["conversations"][0], {"from": "function_call", "value": json.dumps(call)}]
    with pytest.raises(DataError) as error:
        encode(tmp_path, BLOCKS, {"conversations": turns})
    assert "spells a special token" in error.value.problems[0]


def test_a_weight_of_a_call_is_that_of_its_tokens(tmp_path: Path) -> None:
    messages = [{**m, "weight": 0.5} if "tool_calls" in m else m for m in MESSAGES]
    encoded = encode(tmp_path, BLOCKS, {"messages": messages, "tools": TOOLS})
    runs = encoded.trained[encoded.trained > 0]
    assert {*runs.tolist()} == {0.5, 1.0}
    assert runs[0] == 0.5
    assert runs[-1] == 1.0


WRONG: dict[str, tuple[Any, str]] = {
    "no json": (
        "add(1, 2)",
        (
            "message 2 has the role 'function_call' and the text 'add(1, 2)'; expected the JSON "
            'of {"name": ..., "arguments": {...}}, or of a list of these; correct it, or give it '
            "the role of the assistant"
        ),
    ),
    "no call": ('{"a": 1}', "message 2 has the role 'function_call' and the text '{\"a\": 1}'; ex"),
    "no calls": ("[]", "message 2 has the role 'function_call' and the text '[]'; expected the J"),
    "arguments of a list": (
        '{"name": "add", "arguments": [1]}',
        "message 2 has the role 'function_call' and the text",
    ),
    "a long text": (
        "x" * 1000,
        f"message 2 has the role 'function_call' and the text '{'x' * 79}...; expected",
    ),
    "half a character": (
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        "message 2 has \\ud800 without the other half of its surrogate pair",
    ),
    "null": (None, "message 2 must have a string as 'value'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_call_is_one_message(tmp_path: Path, kind: str) -> None:
    text, wanted = WRONG[kind]
    turns = [SHAREGPT["conversations"][0], {"from": "function_call", "value": text}]
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": turns}])
    (problem,) = sample_reader("sharegpt", (), Conversation).problems([path])
    assert problem.startswith(f"{path}:1: {wanted}")


def test_tools_that_are_no_json_are_one_message(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{**SHAREGPT, "tools": "[{'name': 'add'}]"}])
    (problem,) = sample_reader("sharegpt", (), Conversation).problems([path])
    assert problem == (
        f"{path}:1: 'tools' must be a list of tools, or JSON text of one, found text that is no "
        "JSON: \"[{'name': 'add'}]\"; correct it, or leave it out"
    )
