"""Counts, lengths and reasons: in the terminal, as JSON, and on the page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.text.indexed import read_index
from ascend_run.tools.preprocess.command import command
from ascend_run.tools.preprocess.lengths import Lengths
from tests.support.chats import CHATML, write_lines, write_tokenizer

from .test_samples import ANSWERS, QUESTION, preprocess

WORDS = [
    "one",
    "two two",
    "three three three",
    "one",  # a duplicate
    " ",
    "five " * 40,
]


def run(*words: str | Path) -> str:
    done = CliRunner().invoke(command, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def shown(page: str) -> str:
    """The text of a page, with one space for each tag."""
    body = page[page.index("<main>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_every_length_is_in_one_bin_and_the_figures_are_exact(lengths: list[int]) -> None:
    found = Lengths.of(np.array(lengths, np.int32))

    assert sum(part.count for part in found.bins) == len(lengths)
    for part in found.bins:
        assert part.count == sum(part.first <= n <= part.last for n in lengths)
    assert found.bins[0].count > 0
    assert found.bins[-1].count > 0
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    for value, share in ((found.median, 5), (found.ninetieth, 9)):
        assert value in lengths
        assert 10 * sum(n <= value for n in lengths) >= share * len(lengths)
        assert 10 * sum(n < value for n in lengths) < share * len(lengths)


def test_bars_are_as_long_as_their_counts() -> None:
    lines = [*Lengths.of(np.array([0, 1, 2, 3, 3, 3, 9])).picture()]

    assert [line.split()[0] for line in lines] == ["0", "1", "2", "4", "8"]
    assert [line.count("#") for line in lines] == [10, 10, 40, 0, 10]
    assert [line.split()[-1] for line in lines] == ["1", "1", "4", "0", "1"]


def test_plain_text_is_reported_in_all_three_ways(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in WORDS])
    write_tokenizer(tmp_path / "t", CHATML)
    page = tmp_path / "data.html"
    given = ("--input", source, "--output-prefix", tmp_path / "d")
    given += ("--tokenizer", tmp_path / "t", "--no-append-eod")
    output = run(*given)
    report = json.loads(run(*given, "--overwrite", "--report", page, "--json"))

    lengths = read_index(tmp_path / "d").lengths.tolist()
    found = report["train"]["lengths"]
    assert (found["shortest"], found["longest"]) == (min(lengths), max(lengths))
    assert f"length of a document: {min(lengths)} to {max(lengths)} tokens" in output
    assert output.count("#") > 40
    words = shown(page.read_text())
    assert "duplicate 1 empty 1" in words
    for part in found["bins"]:
        assert re.search(rf"\b{part['first']}( to {part['last']})? {part['count']}\b", words)


def test_samples_are_reported_with_reasons_and_places(tmp_path: Path) -> None:
    good = {"conversations": [*QUESTION, ANSWERS[0]]}
    spelled = {"conversations": [*QUESTION, {"from": "gpt", "value": "<|im_end|>"}]}
    source = write_lines(tmp_path / "a.jsonl", [good, spelled, good])
    page = tmp_path / "data.html"

    done = preprocess(tmp_path, source, "sharegpt", "--report", str(page))

    assert done.exit_code == 0, done.output
    assert "length of input_ids: " in done.output
    assert "length of labels" not in done.output  # they are as long
    words = shown(page.read_text())
    assert "input_ids: number by length in tokens" in words
    assert f"spells a special token 1 {source}:2" in words


def test_a_page_that_is_there_is_kept_and_none_is_an_input(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"conversations": [*QUESTION, ANSWERS[0]]}])
    page = tmp_path / "data.html"
    page.write_text("mine")

    kept = preprocess(tmp_path, source, "sharegpt", "--report", str(page))
    taken = preprocess(tmp_path, source, "sharegpt", "--overwrite", "--report", source)

    assert page.read_text() == "mine"
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]
    assert str(page) in str(kept.exception)
    assert "--report" in str(getattr(taken.exception, "problems", taken.exception))
