"""Token files of samples: what they hold, decoded; fine-tuning reads them as it does sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner, Result

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import AscendRunError
from ascend_run.plugins.tasks.sft import Sft, SftConfig
from ascend_run.text import corpus
from ascend_run.text.chat_tokenizer import load_chat_tokenizer, read_tokenizer_config
from ascend_run.text.indexed import read_index
from ascend_run.text.sample_files import field_prefix
from ascend_run.tools.preprocess import batches, samples, writing
from ascend_run.tools.preprocess.command import command
from ascend_run.tools.preprocess.options import PreprocessOptions
from tests.plugins.tasks.sft.test_samples import chat, context_of
from tests.plugins.tasks.sft.test_sources import problems
from tests.plugins.tasks.sft.test_training import conversations
from tests.support.chats import CHATML, write_lines, write_tokenizer

from .killed_worker import killed

QUESTION = [{"from": "human", "value": "one two?"}]
ANSWERS = [{"from": "gpt", "value": "three"}, {"from": "gpt", "value": "four five"}]


def preprocess(folder: Path, source: str | Path, handler: str, *options: str) -> Result:
    """Run the command on a source; output below ``folder/out``."""
    tokenizer = folder / "t"
    if not tokenizer.exists():
        write_tokenizer(tokenizer, CHATML)
    arguments = ["--input", source, "--output-prefix", folder / "out/d", "--tokenizer", tokenizer]
    return CliRunner().invoke(command, [*map(str, arguments), "--handler", handler, *options])


def fields_of(folder: Path, *names: str) -> list[list[list[int]]]:
    """Return the documents of each field."""
    found = []
    for name in names:
        index = read_index(field_prefix(folder / "out/d", name))
        parts = np.split(index.ids(), np.cumsum(index.lengths)[:-1])
        found.append([part.tolist() for part in parts])
    return found


def decoded(folder: Path, ids: list[int]) -> str:
    tokenizer = load_chat_tokenizer(folder / "t", read_tokenizer_config(folder / "t"))
    text: str = tokenizer.backend.decode(
        [number for number in ids if number != -100], skip_special_tokens=False
    )
    return text


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_token_files_give_fine_tuning_the_samples_of_their_source(tmp_path: Path) -> None:
    records = [*conversations(20), chat(" "), chat("four five six seven eight nine ten " * 20)]
    source = write_lines(tmp_path / "a.jsonl", records)
    context = context_of(tmp_path, source, 64)
    done = preprocess(tmp_path, source, "chat")
    assert done.exit_code == 0, done.output
    for options in ({}, {"too_long": "truncate"}, {"too_long": "turns"}, {"packing": True}):
        plain = Sft(SftConfig(**options)).ascend_task().datasets(context, 50, 0).train
        written = context_of(tmp_path, str(tmp_path / "out/d"), 64)
        assert Sft(SftConfig(**options)).ascend_check(written.config) == []
        read = Sft(SftConfig(**options)).ascend_task().datasets(written, 50, 0).train
        assert len(plain.samples.packs) == len(read.samples.packs) > 5
        for index in range(50):
            for name, tensor in plain[index].items():
                assert torch.equal(read[index][name], tensor)


def test_token_files_and_sources_are_joined_in_their_order(tmp_path: Path) -> None:
    sources = [
        write_lines(tmp_path / f"{name}.jsonl", [chat(word) for word in words])
        for name, words in (("a", ["one", "two"]), ("b", ["three", "four", "five"]))
    ]
    assert preprocess(tmp_path, sources[0], "chat").exit_code == 0
    orders = []
    for paths in (sources, [str(tmp_path / "out/d"), sources[1]]):
        context = context_of(tmp_path, "")
        object.__setattr__(context.config.data, "train", tuple(paths))
        data = Sft(SftConfig(shuffle=False)).ascend_task().datasets(context, 5, 0).train
        orders.append([data[index]["labels"].tolist() for index in range(5)])
    assert orders[0] == orders[1]


def test_conversations_of_a_table_are_ids_and_labels(tmp_path: Path) -> None:
    rows = [{"conversations": [*QUESTION, ANSWERS[0], *QUESTION, ANSWERS[1]], "system": "hello"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    done = preprocess(tmp_path, tmp_path / "a.parquet", "sharegpt")
    assert done.exit_code == 0, done.output
    ((ids,), (labels,)) = fields_of(tmp_path, "input_ids", "labels")
    whole = turn("system", "hello") + "".join(
        turn("user", "one two?") + turn("assistant", text) for text in ("three", "four five")
    )
    assert decoded(tmp_path, ids) == whole.removesuffix("\n")
    assert decoded(tmp_path, labels) == "three<|im_end|>four five<|im_end|>"
    assert all(label in (-100, number) for number, label in zip(ids, labels, strict=True))


PAIRS: dict[str, dict[str, Any]] = {
    "alpaca-pairwise": {
        "instruction": "hello",
        "history": [["one two?", "three"]],
        "chosen": "four",
        "rejected": "five six",
    },
    "sharegpt-pairwise": {
        "conversations": [*QUESTION, ANSWERS[0], {"from": "human", "value": "hello"}],
        "chosen": {"from": "gpt", "value": "four"},
        "rejected": {"from": "gpt", "value": "five six"},
    },
}


@pytest.mark.parametrize("handler", PAIRS)
def test_of_a_pair_only_the_answers_are_trained(tmp_path: Path, handler: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [PAIRS[handler]])
    done = preprocess(tmp_path, source, handler)
    assert done.exit_code == 0, done.output
    prompt = turn("user", "one two?") + turn("assistant", "three") + turn("user", "hello")
    for side, answer in (("chosen", "four"), ("rejected", "five six")):
        (ids,), (labels,) = fields_of(tmp_path, f"{side}_input_ids", f"{side}_labels")
        assert decoded(tmp_path, ids) == prompt + turn("assistant", answer).removesuffix("\n")
        assert decoded(tmp_path, labels) == f"{answer}<|im_end|>"


def test_equal_answers_are_treated_as_a_run_treats_them(tmp_path: Path) -> None:
    pair = PAIRS["alpaca-pairwise"]
    source = write_lines(tmp_path / "a.jsonl", [pair, {**pair, "rejected": pair["chosen"]}])
    refused = preprocess(tmp_path, source, "alpaca-pairwise").exception
    assert isinstance(refused, AscendRunError)
    (problem,) = refused.problems
    assert problem.startswith(f"{source}:2: its chosen and rejected answers are the same tokens")
    done = preprocess(tmp_path, source, "alpaca-pairwise", "--equal-answers=drop", "--json")
    assert done.exit_code == 0, done.output
    left_out = json.loads(done.output)["left_out"]
    assert left_out == {"equal answers": {"count": 1, "first": [f"{source}:2"]}}
    assert [len(field) for field in fields_of(tmp_path, "chosen_input_ids")] == [1]

    chats = write_lines(tmp_path / "b.jsonl", [chat("one")])
    refused = preprocess(
        tmp_path, chats, "messages", "--equal-answers=drop", "--overwrite"
    ).exception
    assert "--equal-answers is for handlers of pairs, and 'messages' makes Conv" in str(refused)


def test_a_rating_is_the_label_of_its_placeholder(tmp_path: Path) -> None:
    records = [
        {"input": "one two? three <s> four five <s>", "value": ["h", "a"]},
        {"input": "six <s>", "value": ["a"]},
    ]
    options = ["--placeholder-token=<s>", "--reward-tokens=h", "--reward-tokens=a"]
    source = write_lines(tmp_path / "a.jsonl", records)
    done = preprocess(tmp_path, source, "process-reward", *options)
    assert done.exit_code == 0, done.output
    ids, labels = fields_of(tmp_path, "input_ids", "labels")
    assert decoded(tmp_path, ids[0]) == records[0]["input"]
    assert decoded(tmp_path, labels[0]) == "ha"
    for sample, label in zip(ids, labels, strict=True):
        at = [index for index, number in enumerate(label) if number != -100]
        assert [decoded(tmp_path, sample[index : index + 1]) for index in at] == ["<s>"] * len(at)

    asked = {"instruction": "one * two?", "input": "three * four *", "value": ["h", "a"]}
    asking = write_lines(tmp_path / "c.jsonl", [asked])
    stars = ["--placeholder-token=*", *options[1:], "--overwrite"]
    done = preprocess(tmp_path, asking, "process-reward", *stars)
    assert done.exit_code == 0, done.output
    (ids,), (labels,) = fields_of(tmp_path, "input_ids", "labels")
    question = turn("user", "one * two?")
    assert decoded(tmp_path, ids) == question + turn("assistant", "three * four *")
    assert decoded(tmp_path, labels) == "ha"
    rated = [n for n, label in zip(ids, labels, strict=True) if label != -100]
    assert decoded(tmp_path, rated) == "**"

    wrong = write_lines(tmp_path / "b.jsonl", [*records, {"input": "x <s>", "value": ["h", "h"]}])
    told = preprocess(tmp_path, wrong, "process-reward", *options, "--overwrite").exception
    assert isinstance(told, AscendRunError)
    assert told.problems == (
        f"{wrong}:3: it has 1 placeholders and 2 ratings; each step needs one of both",
    )
    odd = [*options[:2], "--reward-tokens=What is the capital"]
    told = preprocess(tmp_path, source, "process-reward", *odd).exception
    assert "'What is the capital' is" in str(told)
    assert "it must be one" in str(told)


VERIFIABLE: dict[str, dict[str, Any]] = {
    "alpaca-r1": {"instruction": "one", "input": "two?", "output": "three"},
    "sharegpt-r1": {
        "conversations": [{"from": "human", "value": "one\ntwo?"}, ANSWERS[0]],
    },
}


@pytest.mark.parametrize("handler", VERIFIABLE)
def test_a_reasoning_task_is_a_prompt_with_its_answer(tmp_path: Path, handler: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [VERIFIABLE[handler]])
    done = preprocess(tmp_path, source, handler)
    assert done.exit_code == 0, done.output
    (ids,), (labels,) = fields_of(tmp_path, "input_ids", "labels")
    assert decoded(tmp_path, ids) == turn("user", "one\ntwo?") + "<|im_start|>assistant\n"
    assert decoded(tmp_path, labels) == "three"


def test_a_prompt_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    record = {"instruction": "one", "system": "hello", "output": "not read"}
    source = write_lines(tmp_path / "a.jsonl", [record])
    assert preprocess(tmp_path, source, "prompt").exit_code == 0
    ((ids,),) = fields_of(tmp_path, "input_ids")
    prompt = turn("system", "hello") + turn("user", "one") + "<|im_start|>assistant\n"
    assert decoded(tmp_path, ids) == prompt
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "d.json", "d_packed_input_ids_document.bin", "d_packed_input_ids_document.idx",
    ]  # fmt: skip


def test_the_record_says_what_was_read_and_left_out(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [chat("one"), chat(" "), chat("a<|im_end|>")])
    done = preprocess(tmp_path, source, "messages", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    record = json.loads((tmp_path / "out/d.json").read_text())
    assert record["report"] == {
        "read": 3,
        "samples": 1,
        "left_out": {
            "nothing to train on": {"count": 1, "first": [f"{source}:2"]},
            "spells a special token": {"count": 1, "first": [f"{source}:3"]},
        },
    }
    assert {name: told[name] for name in record["report"]} == record["report"]
    assert (record["sample"], record["handler"]) == ("Conversation", "messages")


REFUSED: dict[str, tuple[str, list[str], list[str]]] = {
    "handler": ("shargpt", [], ["there is no data handler 'shargpt'; installed are alpaca, "]),
    "keys": ("alpaca", ["--map-keys=x=y"], ["'x' is no key of the handler 'alpaca'"]),
    "template": ("chat", ["--template=vicunna"], ["--template='vicunna': expected one of"]),
    "no tokens": ("process-reward", [], ["needs --placeholder-token TOKEN and --reward-tokens"]),
    "tokens": ("chat", ["--placeholder-token=x"], ["are for handlers of process rewards"]),
    "of text": (
        "chat",
        ["--holdout=0.1", "--json-key=x"],
        ["--json-key has no effect with --handler chat", "--holdout has no effect"],
    ),
    "of samples": ("text", ["--template=chatml"], ["--template has no effect with --handler text"]),
    "roles": ("sharegpt", [], [":1: message 1 has the role 'narrator'", ":2: lacks"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_is_one_message_and_writes_nothing(tmp_path: Path, kind: str) -> None:
    handler, options, expected = REFUSED[kind]
    records = [{"conversations": [{"from": "narrator", "value": "x"}]}, {"text": "x"}]
    source = write_lines(tmp_path / "a.jsonl", records)
    told = preprocess(tmp_path, source, handler, *options).exception
    assert isinstance(told, AscendRunError)
    assert told.exit_code == 2
    assert not [text for text in expected if text not in str(told)], str(told)
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


KINDS: dict[str, tuple[str, str, str]] = {
    "broken line": ("sharegpt", '{"conversations": [', ":2: not JSON: "),
    "unknown role": (
        "sharegpt",
        '{"conversations": [{"from": "narrator", "value": "x"}]}',
        ":2: message 1 has the role 'narrator'; expected one of system, user, ",
    ),
    "missing field": ("alpaca", '{"instruction": "x"}', ":2: lacks 'output'; its keys: "),
    "schema": ("sharegpt", "parquet", "a.parquet has another schema: its columns are 'q'; the "),
    "folder": ("sharegpt", "no tokenizer", "t has no tokenizer.json and no tokenizer.model and "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_of_each_kind_through_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """One message with file and row, exit code 2, no traceback, and nothing is written."""
    handler, line, expected = KINDS[kind]
    write_tokenizer(tmp_path / "t", CHATML)
    good = {"conversations": [*QUESTION, ANSWERS[0]], "instruction": "one", "output": "two"}
    source = Path(write_lines(tmp_path / "a.jsonl", [good, line]))
    if line == "parquet":
        source = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pa.table({"q": ["x"]}), source)
    elif line == "no tokenizer":
        source = Path(write_lines(tmp_path / "a.jsonl", [good]))
        (tmp_path / "t/tokenizer.json").unlink()
    words = ["--input", source, "--output-prefix", tmp_path / "out/d", "--handler", handler]
    capsys.readouterr()
    code = run(["preprocess", *map(str, words), "--tokenizer", str(tmp_path / "t")])
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert expected in errors
    assert str(tmp_path) in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


def test_worker_processes_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of conversations and of documents; refusals of the template are reported from there too."""
    monkeypatch.setattr(samples, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(batches, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 7)
    records = [{**record, "text": f"{n} one two"} for n, record in enumerate(conversations(600))]
    source = write_lines(tmp_path / "a.jsonl", [*records, {**chat(" "), "text": "three"}])
    tokenizer = write_tokenizer(tmp_path / "t", CHATML)
    contents: list[dict[str, bytes]] = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        given: dict[str, Any] = {"inputs": (Path(source),), "workers": workers}
        samples.preprocess_samples(
            samples.SampleOptions(
                **given, output_prefix=out / "c", handler="chat", tokenizer=tokenizer
            )
        )
        writing.preprocess(
            PreprocessOptions(
                **given, output_prefix=out / "d", tokenizer=tokenizer / "tokenizer.json",
                end_token="</s>",
            )
        )  # fmt: skip
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 8
    refused = write_lines(tmp_path / "b.jsonl", [*records, chat("\U0010fff0")])
    with pytest.raises(AscendRunError, match=f"{refused}:601: it holds the code points"):
        samples.preprocess_samples(
            samples.SampleOptions(
                inputs=(Path(refused),), workers=2, output_prefix=tmp_path / "no/c",
                handler="chat", tokenizer=tokenizer,
            )
        )  # fmt: skip
    assert not [*(tmp_path / "no").glob("*")]


def test_a_worker_process_that_is_killed_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conversations and of documents; no file is left."""
    for module in (samples, batches):
        monkeypatch.setattr(module, "_BYTES_PER_PROCESS", 1)
        monkeypatch.setattr(module, "_encode", killed)
    source = write_lines(tmp_path / "a.jsonl", [{**chat("one"), "text": "two"}] * 600)
    tokenizer = write_tokenizer(tmp_path / "t", CHATML)
    given: dict[str, Any] = {"inputs": (Path(source),), "workers": 2}
    of_samples = samples.SampleOptions(
        **given, output_prefix=tmp_path / "out/c", handler="chat", tokenizer=tokenizer
    )
    of_documents = PreprocessOptions(
        **given, output_prefix=tmp_path / "out/d", tokenizer=tokenizer / "tokenizer.json",
        end_token="</s>",
    )  # fmt: skip
    message = (
        "one of 2 worker processes was killed, perhaps for lack of memory; use fewer --workers"
    )
    with pytest.raises(AscendRunError, match=message):
        samples.preprocess_samples(of_samples)
    with pytest.raises(AscendRunError, match=message):
        writing.preprocess(of_documents)
    assert not [*(tmp_path / "out").glob("*")]


def test_a_dataset_that_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [chat("one"), chat("two")])
    assert preprocess(tmp_path, source, "chat").exit_code == 0
    dataset, tokenizer = str(tmp_path / "out/d"), str(tmp_path / "t")

    def told(**options: Any) -> str:
        (problem,) = problems(options, train=(dataset,), tokenizer=tokenizer)
        return problem

    assert problems(train=(dataset,), tokenizer=tokenizer) == []
    assert "was made with another chat template than this run has" in told(template="alpaca")
    assert "another date and special_tokens" in told(date="2026-01-31", special_tokens="keep")
    path = Path(f"{field_prefix(dataset, 'labels')}.bin")
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert f"{path} is damaged" in told()
    path.write_bytes(content[:-4])
    assert f"{path} is truncated" in told()
    Path(f"{dataset}.json").unlink()
    assert "its record" in told()
    pair = write_lines(tmp_path / "b.jsonl", [PAIRS["alpaca-pairwise"]])
    assert preprocess(tmp_path, pair, "alpaca-pairwise", "--overwrite").exit_code == 0
    assert "holds Preference samples of the handler 'alpaca-pairwise'" in told()


def test_output_that_is_the_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = write_lines(tmp_path / "out/d.json", [chat("one")])
    told = preprocess(tmp_path, source, "chat", "--overwrite").exception
    assert isinstance(told, AscendRunError)
    assert "the record" in str(told)
    assert json.loads(Path(source).read_text()) == chat("one")
