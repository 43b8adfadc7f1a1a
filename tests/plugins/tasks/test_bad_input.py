"""What a user gets for bad input: one message with all of it, and exit code 2."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.entrypoints.cli import run
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.preference_files import preferences
from tests.support.tiny_llama import write_llama

EQUAL: Final = "its chosen and rejected answers are the same tokens; correct one, or remove the row"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_llama(folder / "model")
    write_llama(folder / "small", vocab_size=300)
    shutil.copytree(folder / "model", folder / "quantised")
    file = folder / "quantised" / "config.json"
    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    write_lines(folder / "pairs.jsonl", preferences(4))
    return folder


def said(
    capsys: pytest.CaptureFixture[str], folder: Path, output: Path, *settings: str, **given: Any
) -> str:
    """Train by the command line, which fails; return the message."""
    values = {
        "task": "dpo",
        "run.output_dir": output,
        "model.hf_path": folder / "model",
        "data.train": folder / "pairs.jsonl",
        "data.tokenizer": folder / "tokenizer",
        "data.seq_length": 96,
        "train.eval_interval": 0,
        "train.train_iters": 1,
        "train.global_batch_size": 4,
        "train.precision": "fp32",
        **{name.replace("__", "."): value for name, value in given.items()},
    }
    code = run(["train", *settings, *(f"{key}={value}" for key, value in values.items())])
    text = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in text
    found = re.search(r"^error: .*", text, re.MULTILINE | re.DOTALL)
    assert found is not None, text
    return found.group()


@pytest.mark.exhaustive(by=lambda task: {task} & {"dpo"})
@pytest.mark.parametrize("task", ["dpo", "simpo", "orm"])
def test_pairs_that_are_no_pairs(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, task: str
) -> None:
    records = preferences(5)
    for row in (1, 3):
        records[row]["rejected"] = records[row]["chosen"]
    records[0]["chosen"]["value"] = records[4]["rejected"]["value"] = ""
    file = write_lines(tmp_path / "pairs.jsonl", records)
    lacks = "answer has no token to train on; write an answer, or remove the row"
    wanted = {1: f"its chosen {lacks}", 2: EQUAL, 4: EQUAL, 5: f"its rejected {lacks}"}
    message = said(capsys, folder, tmp_path / "run", task=task, data__train=file)
    assert message.splitlines() == [
        "error: these samples cannot be encoded:",
        *(f"  {file}:{row}: {why}" for row, why in wanted.items()),
    ]


def test_a_reference_of_another_vocabulary(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    """Beside another problem of the run."""
    reference = folder / "small"
    message = said(
        capsys,
        folder,
        tmp_path / "run",
        plugins__dpo__reference=reference,
        plugins__dpo__loss="ipo",
        plugins__dpo__label_smoothing=0.1,
    )
    headline, smoothing, vocabulary = message.splitlines()
    assert headline == "error: this run cannot start:"
    assert smoothing.startswith("  dpo: plugins.dpo.label_smoothing=0.1 has no meaning with")
    assert vocabulary == (
        f"  dpo: plugins.dpo.reference={reference} holds another model, and the reference is built "
        "as this run's: model.vocab_size is 300 there and 400 here; name a folder of a model like "
        "this one"
    )


NOT_READ: Final = (
    "quantization_config: quantised weights are not read; save them dequantised "
    "(model.dequantize())"
)


@pytest.mark.needs_plugins("lora")
@pytest.mark.parametrize("enable", [(), ("--enable", "lora")], ids=["all of it", "adapters"])
def test_a_quantised_base(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, enable: tuple[str, ...]
) -> None:
    """As bitsandbytes stores it, to train or to train adapters beside."""
    message = said(capsys, folder, tmp_path / "run", *enable, model__hf_path=folder / "quantised")
    assert message.splitlines() == [
        "error: config.json is not a llama config that can be built:",
        f"  {NOT_READ}",
    ]
    message = said(capsys, folder, tmp_path / "r", plugins__dpo__reference=folder / "quantised")
    assert message.splitlines()[1].endswith(NOT_READ)


@pytest.mark.needs_plugins("lora", "qlora")
def test_a_base_that_is_quantised_without_adapters(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    message = said(capsys, folder, tmp_path / "run", "--enable", "qlora")
    assert message.splitlines() == [
        "error: cannot enable this set:",
        "  'qlora' requires 'lora'; add it: --enable qlora,lora",
    ]
