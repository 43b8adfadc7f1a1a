"""What keeps a reward model from starting, and what keeps other tasks from training one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.preference_files import preferences
from tests.support.small_runs import prepare

SIZES = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.vocab_size": 512,
}


def problems_of(folder: Path, model: Mapping[str, Any] = SIZES, /, **changes: Any) -> Sequence[str]:
    """Return what is wrong with a run that is right but for the changes."""
    write_tokenizer(folder / "tokenizer", CHATML)
    values = {
        "task": "orm",
        "run.output_dir": str(folder / "run"),
        **model,
        "data.train": [write_lines(folder / "pairs.jsonl", preferences(4))],
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_length": 96,
        "train.eval_interval": 0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    try:
        prepare(values, (), 1)
    except ConfigError as error:
        return error.problems or [str(error)]
    return []


def test_a_run_that_is_right_starts(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == []


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no files": ({"data__train": []}, "orm: data.train is empty; name files of pairs"),
    "several labels": (
        {"model__num_labels": 3},
        "orm: model.num_labels=3, and a reward is 1 score; name a folder with 1 label",
    ),
    "later tokens": (
        {"model__mtp_num_layers": 1},
        "orm: model.mtp_num_layers=1 predicts further tokens",
    ),
    "an output layer to train": (
        {"task": "dpo", "model__num_labels": 1},
        "dpo: model.num_labels=1 is a score head, and dpo trains an output layer",
    ),
    "an output layer of conversations": (
        {"task": "sft", "model__num_labels": 1, "plugins__sft__handler": "sharegpt"},
        "sft: model.num_labels=1 is a score head, and sft trains an output layer",
    ),
    "an output layer of text": (
        {"task": "pretrain", "model__num_labels": 2},
        "pretrain: model.num_labels=2 is a score head, and pretrain trains an output layer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_named(tmp_path: Path, case: str) -> None:
    changes, message = CASES[case]
    assert any(message in problem for problem in problems_of(tmp_path, **changes))


def test_a_margin_below_zero_is_refused(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, plugins__orm__margin=-1.0)
    assert len(problems) == 1
    assert "plugins.orm.margin" in problems[0]


def write_folder(folder: Path, **changes: Any) -> str:
    keys = {
        "architectures": ["LlamaForSequenceClassification"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        **changes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    return str(folder)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"id2label": {"0": "bad", "1": "so-so", "2": "good"}}, "orm: model.num_labels=3"),
        ({}, "orm: model.num_labels=2"),  # transformers names the labels of no other number
        ({"num_labels": 1}, None),
        ({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, None),
        ({"num_labels": "one"}, "model.num_labels"),
    ],
)
def test_the_labels_of_a_folder_are_read(
    tmp_path: Path, labels: dict[str, Any], message: str | None
) -> None:
    folder = write_folder(tmp_path / "model", **labels)
    problems = problems_of(tmp_path, {"model.hf_path": folder})
    if message is None:
        assert problems == []
    else:
        assert [problem for problem in problems if message in problem], problems
