"""Pairs of answers, as files and as token ids by transformers' own templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ascend_run.ops.preference_loss import METRICS
from tests.support.chats import CHATML, GENERATION, with_mask, write_lines, write_tokenizer
from tests.support.tiny_llama import write_llama

from .plain_preferences import Answer, Pair

WORDS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "hello", "fox"),
)


def preferences(count: int) -> list[dict[str, Any]]:
    """Return records of ``sharegpt-pairwise``; answers differ in length."""
    made = []
    for index in range(count):
        said = [WORDS[(index * 5 + k) % len(WORDS)] for k in range(1 + index % 4)]
        made.append(
            {
                "conversations": [{"from": "human", "value": " ".join(said) + "?"}],
                "chosen": {"from": "gpt", "value": " ".join(reversed(said)) + "."},
                "rejected": {"from": "gpt", "value": " ".join([*said, WORDS[index % 7]])},
            }
        )
    return made


def tokenized(folder: Path, file: Path) -> list[Pair]:
    """Return the pairs of a file, for a template with generation blocks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(record: dict[str, Any], side: str) -> Answer:
        messages = [
            {"role": "user", "content": record["conversations"][0]["value"]},
            {"role": "assistant", "content": record[side]["value"]},
        ]
        return with_mask(tokenizer, messages)

    records = map(json.loads, file.read_text().splitlines())
    return [(answer(record, "chosen"), answer(record, "rejected")) for record in records]


def write_pairs(folder: Path, count: int) -> Path:
    """Write ``tokenizer`` and ``train.jsonl``, a file of pairs."""
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", preferences(count))
    return folder


def write_models_and_pairs(folder: Path, pairs: int) -> Path:
    """Write a model, another one and a deeper one, their tokenizer, and files of pairs."""
    write_llama(folder / "model", max_position_embeddings=256)
    write_llama(folder / "other", seed=1, max_position_embeddings=256)
    write_llama(folder / "deep", num_hidden_layers=4, max_position_embeddings=256)
    write_pairs(folder, pairs)
    write_tokenizer(folder / "blocks", GENERATION)
    write_lines(folder / "held-out.jsonl", preferences(7))
    return folder


def assert_equal_steps(
    readings: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, float]],
    metrics: Sequence[str] = METRICS,
) -> None:
    """Compare every metric of every step."""
    steps = [line for line in readings if "loss" in line]
    assert len(steps) == len(plain)
    for name in ("loss", "grad_norm", *metrics):
        pairs = [(line[name], one[name]) for line, one in zip(steps, plain, strict=True)]
        if name == "rewards/accuracies" and plain[0]["rewards/margins"] == 0.0:
            pairs = pairs[1:]  # between equal models the sign of a margin is that of rounding
        found, wanted = zip(*pairs, strict=True) if pairs else ((), ())
        assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), name


def assert_evaluated_twice(
    readings: Sequence[Mapping[str, Any]], plain: Mapping[str, float], metrics: Sequence[str]
) -> None:
    """Compare every metric of two evaluations, between which no weight changes."""
    evaluated = [line for line in readings if "eval_loss" in line]
    for name in ("loss", *metrics):
        for line in evaluated:
            assert line[f"eval_{name}"] == pytest.approx(plain[name], rel=1e-5, abs=2e-6), name
    assert len(evaluated) == 2
