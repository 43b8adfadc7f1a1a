"""The folder of an evaluation: JSON, page, and comparison."""

import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import DataError, StorageError
from ascend_run.tools.evaluate.asking import ScoredBy
from ascend_run.tools.evaluate.comparing import compared
from ascend_run.tools.evaluate.page import render_page
from ascend_run.tools.evaluate.results import Perplexity, Results
from ascend_run.tools.evaluate.storing import read_results, require_new, write_results
from tests.tools.evaluate.fixed_model import FixedModel, result_of, write_jsonl, write_mmlu

HOSTILE = '<script>alert("1")</script> & </pre>'


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """One of each kind: by log-probability, by text, without an answer."""
    write_jsonl(tmp_path / "test.jsonl", [{"question": HOSTILE, "answer": "#### 7"}] * 2)
    gsm8k = result_of(f"gsm8k={tmp_path}", FixedModel(texts=[f"{HOSTILE} 7", HOSTILE[:8]]))
    mmlu = result_of(f"mmlu={write_mmlu(tmp_path / 'mmlu')}", FixedModel(best="BDBC"))
    perplexity = Perplexity(name="<b>.txt", documents=2, tokens=9, loss=1.25)
    return Results(model="<model>", perplexities=(perplexity,), tasks=(mmlu, gsm8k))


def test_results_are_read_as_they_were_written(tmp_path: Path, results: Results) -> None:
    write_results(results, tmp_path / "new", written=0.0)
    assert read_results(tmp_path / "new") == results
    assert read_results(tmp_path / "new" / "results.json") == results
    content = json.loads((tmp_path / "new" / "results.json").read_text())
    assert content["tasks"][0]["correct"] == 3
    assert content["tasks"][0]["answers"][2]["expected"] == "A"
    assert (tmp_path / "new" / "results.html").read_text() == render_page(results, written=0.0)


def test_an_infinite_perplexity_is_null(tmp_path: Path) -> None:
    one = Perplexity(name="x", documents=1, tokens=1, loss=1e4)
    write_results(Results(model="m", perplexities=(one,)), tmp_path / "new", written=0.0)
    content = json.loads((tmp_path / "new" / "results.json").read_text())
    assert content["perplexity"][0]["perplexity"] is None
    assert read_results(tmp_path / "new").perplexities == (one,)


class Texts(HTMLParser):
    """Tags, and the text of the page without its style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open not in ("style", "script"):
            self.text += data


def test_the_page_shows_each_question_and_why(results: Results) -> None:
    page = Texts(render_page(results, written=0.0))
    for task in results.tasks:
        for one in task.judged:
            assert one.question in page.text
            assert one.why in page.text
            assert one.text is None or one.text in page.text
    assert (
        page.text.count("\N{CHECK MARK} right") == sum(t.total.correct for t in results.tasks) == 4
    )
    assert "\N{BALLOT X} wrong \N{MIDDLE DOT} 4: answer B, expected A" in page.text
    assert "\N{BALLOT X} wrong \N{MIDDLE DOT} 2: no answer, expected 7" in page.text
    assert "75.00%" in page.text


def test_the_page_is_one_file_and_text_is_escaped(results: Results) -> None:
    text = render_page(results, written=0.0)
    page = Texts(text)
    assert not re.findall(r"https?://", text)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2  # the frame's data and script
    assert not {"b", "model"} & set(tags)
    assert HOSTILE not in text


def test_a_comparison_counts_what_changed(results: Results) -> None:
    def changed(answers: Sequence[bool]) -> Results:
        mmlu, gsm8k = results.tasks
        pairs = zip(mmlu.judged, answers, strict=True)
        judged = tuple(attrs.evolve(one, correct=correct) for one, correct in pairs)
        loss = attrs.evolve(results.perplexities[0], loss=1.0)
        tasks = (attrs.evolve(mmlu, judged=judged), gsm8k)
        return attrs.evolve(results, model="other", perplexities=(loss,), tasks=tasks)

    found = compared(
        results, changed([True, False, True, False])
    )  # it was right, right, wrong, right
    rows = {(one.task, one.subject): one for one in found.scores}
    total = rows["mmlu", "total"]
    assert (total.questions, total.a, total.b, total.gained, total.lost) == (4, 3, 2, 1, 2)
    first = rows["mmlu", "abstract_algebra"]
    assert (first.questions, first.a, first.b, first.gained, first.lost) == (3, 2, 2, 1, 1)
    assert rows["gsm8k", "gsm8k"].a == rows["gsm8k", "gsm8k"].b == 1
    assert [(one.a, one.b) for one in found.perplexities] == [(1.25, 1.0)]
    assert found.notes == ()
    assert [line.split() for line in found.lines()][5] == ["<b>.txt", "1.2500", "1.0000", "-0.2500"]


def test_a_comparison_notes_what_differs(results: Results) -> None:
    mmlu, gsm8k = results.tasks
    fewer = attrs.evolve(mmlu, judged=mmlu.judged[1:], form="chat", scored_by=ScoredBy.TEXT)
    longer = attrs.evolve(results.perplexities[0], tokens=10)
    other = Results(model="b", perplexities=(longer,), tasks=(fewer,))
    assert set(compared(results, other).notes) == {
        "<b>.txt: 9 tokens in A, 10 in B",
        "mmlu: form direct in A, chat in B",
        "mmlu: scored by logprob in A, text in B",
        "mmlu: 1 questions are in one of the two only",
        "gsm8k: in A, and not in B",
    }
    with pytest.raises(DataError, match="nothing in common"):
        compared(Results(model="a", tasks=(gsm8k,)), other)


def test_the_command_writes_and_compares_folders(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--task", f"mmlu={write_mmlu(tmp_path / 'mmlu')}", "--shots", "0"]
    for name in ("a", "b"):
        output = ["--output", str(tmp_path / name)]
        assert run(["evaluate", str(folder), *task, *output, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == read_results(tmp_path / "b").record()
    assert run(["evaluate", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {(one["gained"], one["lost"]) for one in record["scores"]} == {(0, 0)}
    assert run(["evaluate", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith(f"A: {folder}\nB: {folder}\n\ntask  subject")


def test_bad_folders_are_one_message(
    folder: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "results.json").write_text('{"format": 2}')
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "y.json").write_text('{"format": 1, "model": "m", "perplexity": [{}]}')
    for name, message in (
        ("none", "No such file or directory; name the folder of an evaluation"),
        ("", "has the format 2; expected 1"),
        ("x.json", "is not JSON"),
        ("y.json", "is no result of an evaluation"),
    ):
        assert message in refused("--compare", tmp_path / name, tmp_path)
    assert "--compare goes with neither MODEL, a task" in refused(folder, "--compare", "a", "b")
    words = [folder, tmp_path / "none.txt", "--output"]
    assert f"{tmp_path} exists; name a new folder" in refused(*words, tmp_path)
    with pytest.raises(StorageError, match="is not a folder; create it"):
        require_new(tmp_path / "no" / "new")
