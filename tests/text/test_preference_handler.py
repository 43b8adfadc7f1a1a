"""Pairs in trl's formats: the ids and the trained tokens are those of trl's own functions."""

from __future__ import annotations

import json
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

from ascend_run.text.reading import sample_reader
from ascend_run.text.samples import Preference
from tests.support.chats import CHATML, write_lines

from .test_pairs import NO_LIMIT, encoder_of, pairs_of


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


EARLIER = [user("one two?"), assistant("six seven"), user("hello")]
RECORDS: dict[str, dict[str, Any]] = {
    "standard": {"prompt": "one two? ", "chosen": "three four", "rejected": "five"},
    "standard, implicit prompt": {"chosen": "one two: hello", "rejected": "one two: six five"},
    "standard, one begins with the other": {"chosen": "one two", "rejected": "one two six"},
    "standard, no space": {"chosen": "one (two)", "rejected": "one (three)"},
    "conversational": {
        "prompt": EARLIER,
        "chosen": [assistant("three four")],
        "rejected": [assistant("five")],
    },
    "conversational, implicit prompt": {
        "chosen": [*EARLIER, assistant("three four")],
        "rejected": [*EARLIER, assistant("five")],
    },
    "conversational, the prompt as text too": {
        "prompt": "one two?",
        "chosen": [user("one two?"), assistant("three four")],
        "rejected": [user("one two?"), assistant("five")],
    },
    "conversational, with a system message": {
        "prompt": [{"role": "system", "content": "six"}, user("hello")],
        "chosen": [assistant("three four")],
        "rejected": [assistant("five")],
    },
}


def of_trl(record: dict[str, Any], tokenizer: Any) -> list[tuple[list[int], int]]:
    """Return the ids of the prompt with each answer, and how many are the prompt's."""
    example = maybe_extract_prompt(record)
    if is_conversational(example):
        example = maybe_apply_chat_template(example, tokenizer)
    else:
        ends = {side: example[side] + tokenizer.eos_token for side in ("chosen", "rejected")}
        example = {**example, **ends}
    prompt = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
    whole = [
        tokenizer(example["prompt"] + example[side], add_special_tokens=False)["input_ids"]
        for side in ("chosen", "rejected")
    ]
    # A token of the end of the prompt and the begin of an answer is the answer's: DPOTrainer's.
    begin = min(sum(takewhile(bool, map(eq, prompt, ids))) for ids in whole)
    return [(ids, begin) for ids in whole]


@pytest.mark.parametrize("name", RECORDS)
def test_ids_and_trained_tokens_are_those_of_trl(tmp_path: Path, name: str) -> None:
    is_text = isinstance(RECORDS[name]["chosen"], str)
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    encoder = encoder_of(tmp_path, template + "{% endif %}{% endfor %}" if is_text else CHATML)
    encoded = pairs_of(tmp_path, [RECORDS[name]], encoder, NO_LIMIT, "preference")
    wanted = of_trl(RECORDS[name], AutoTokenizer.from_pretrained(tmp_path / "t"))
    for index, (ids, prompt) in enumerate(wanted):
        found, trained = encoded[index]
        size = len(found)
        assert found.tolist() == ids[:size]
        assert trained.tolist() == [place >= prompt for place in range(size)]
        # What follows the last trained token, a line end, is not needed.
        assert len(ids) - size <= (0 if is_text else 1)


def test_tables_hold_messages_as_json(tmp_path: Path) -> None:
    record = RECORDS["conversational"]
    path = write_lines(
        tmp_path / "a.jsonl",
        [record, {key: json.dumps(value) for key, value in record.items()}],
    )
    one, other = (
        s for _, s in sample_reader("preference", (), Preference).preferences([Path(path)])
    )
    assert one == other


def test_text_in_brackets_stays_text(tmp_path: Path) -> None:
    record = {"prompt": "a list?", "chosen": "[1, 2]", "rejected": "[1"}
    path = Path(write_lines(tmp_path / "a.jsonl", [record]))
    ((_, sample),) = sample_reader("preference", (), Preference).preferences([path])
    assert sample.chosen == assistant("[1, 2]")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, "lacks 'rejected'"),
    "two kinds": (
        {"prompt": "a", "chosen": "b", "rejected": [assistant("c")]},
        "'chosen' is not one, and 'rejected' a list of messages; expected both of one kind",
    ),
    "prompt of messages": (
        {"prompt": [user("a")], "chosen": "b", "rejected": "c"},
        "'prompt' must be a string, found list",
    ),
    "a number": ({"prompt": "a", "chosen": 1, "rejected": "c"}, "'chosen' must be a string"),
    "nothing common": ({"chosen": "a", "rejected": "b"}, "begin with no common prompt; add"),
    "no common message": (
        {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]},
        "begin with no common prompt; add 'prompt'",
    ),
    "several answers": (
        {
            "prompt": [user("a")],
            "chosen": [assistant("b"), user("c"), assistant("d")],
            "rejected": [assistant("c")],
        },
        "'chosen' has 3 messages after the prompt; expected one, of the assistant",
    ),
    "of the user": (
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [user("c")]},
        "'rejected' ends with the role 'user'; expected an answer of the assistant",
    ),
    "no message": ({"prompt": "a", "chosen": [], "rejected": []}, "'chosen' must be a list of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_bad_row_is_named_once(tmp_path: Path, name: str) -> None:
    record, expected = WRONG[name]
    path = Path(write_lines(tmp_path / "a.jsonl", [RECORDS["standard"], record]))
    (problem,) = sample_reader("preference", (), Preference).problems([path])
    assert f"{path}:2: " in problem or f"{path}:2 " in problem, problem
    assert expected in problem
