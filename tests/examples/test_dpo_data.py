"""The pairs of examples/dpo_data.py are what its documentation says."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/dpo_data.py"
FILES, FUNCTIONS = 40, 30


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of functions that name the file; the last ones are a copy, too short, and unordered."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "test").mkdir()
    copied = function("copied", 0)
    for index in range(FILES):
        functions = [function(f"file{index:02}", number) for number in range(FUNCTIONS)]
        short = function("short", 0)[:190] + "\n"
        repeated = "def repeated():\n" + "    same = same\n" * 20
        text = "".join([copied, short, repeated, *functions])
        (folder / f"file{index}.py").write_text(f"import {index}\n{text}")
    (folder / "test" / "left_out.py").write_text(function("left_out", 0))
    return folder


def function(file: str, number: int) -> str:
    lines = "".join(f"    {file}_{number} = a{line} + b{line} * c{line}\n" for line in range(12))
    return f"def {file}_{number}():\n{lines}"


@pytest.fixture(scope="module")
def written(
    example: dict[str, Any], library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    example["main"](folder, library)
    return folder


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def prompt_of(record: dict[str, Any]) -> str:
    (turn,) = record["conversations"]
    assert turn["from"] == "human"
    return str(turn["value"])


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_chosen_is_the_ending_that_stood_there(written: Path, library: Path, name: str) -> None:
    source = "".join(path.read_text() for path in library.glob("*.py"))
    for record in records(written, name):
        assert prompt_of(record) + record["chosen"]["value"] in source


@pytest.mark.parametrize(("name", "times"), [("train", "REJECTED"), ("heldout", None)])
def test_every_ending_is_chosen_as_often_as_rejected(
    example: dict[str, Any], written: Path, name: str, times: str | None
) -> None:
    pairs = [(r["chosen"]["value"], r["rejected"]["value"]) for r in records(written, name)]
    chosen, rejected = map(Counter, zip(*pairs, strict=True))
    assert chosen == rejected
    assert {*chosen.values()} == {example[times] if times else 1}
    assert len({*pairs}) == len(pairs)


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_rejected_is_of_another_file(written: Path, name: str) -> None:
    for record in records(written, name):
        own, other = (
            {*re.findall(r"(file\d\d|copied)_", record[key]["value"])}
            for key in ("chosen", "rejected")
        )
        assert own
        assert other
        assert not own & other


def test_heldout_passages_are_of_files_not_in_training(
    example: dict[str, Any], written: Path
) -> None:
    train, heldout = (
        {re.findall(r"file\d+|copied", prompt_of(record))[0] for record in records(written, name)}
        for name in ("train", "heldout")
    )
    assert len(records(written, "heldout")) == example["HELDOUT"]
    assert train
    assert heldout
    assert not train & heldout


def test_base_reads_the_passages_of_training_alone(written: Path) -> None:
    texts = [record["text"] for record in records(written, "corpus")]
    chosen = {prompt_of(r) + r["chosen"]["value"] for r in records(written, "train")}
    assert len(texts) == len(chosen)
    assert {*texts} == chosen


def test_passages_are_complete_ordered_and_once_only(
    example: dict[str, Any], library: Path
) -> None:
    files = example["passages"](library)
    texts = [passage.text for file in files for passage in file]
    assert {len(text) for text in texts} == {example["PROMPT"] + example["ENDING"]}
    assert sum(text.startswith("def copied_0") for text in texts) == 1
    assert not any(text.startswith(("def short", "def repeated", "def left_out")) for text in texts)
    assert max(map(len, files)) == example["PER_FILE"] < FUNCTIONS


def test_two_makings_are_equal(example: dict[str, Any], library: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        example["main"](folder, library)
    for name in ("corpus.jsonl", "train.jsonl", "heldout.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
