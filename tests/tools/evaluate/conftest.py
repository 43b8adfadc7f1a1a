"""A model with a tokenizer, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.text.tokenizer import train_tokenizer
from ascend_run.tools.evaluate.sandbox import Limits, SandboxError, run_program
from tests.support.no_network import no_network as no_network
from tests.support.tiny_llama import write_llama
from tests.support.token_files import write_dataset as write_dataset

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven")
TEXT = " ".join(WORDS * 9)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    write_llama(path, vocab_size=tokenizer.vocab_size, eos_token_id=7)
    (path / "tokenizer.json").write_text(tokenizer.to_json())
    return path


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Programs can be confined; where the kernel refuses that, their tests are skipped."""
    try:
        outcome = run_program("", Limits(seconds=60.0))
    except SandboxError as refusal:
        pytest.skip(f"programs cannot be confined here: {refusal}")
    assert outcome.passed


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], no_network: None) -> Callable[..., Any]:
    """Run the command with ``--json`` in float64, without a network."""

    def run_it(*words: object) -> Any:
        capsys.readouterr()
        assert run(["evaluate", *map(str, words), "--json", "--dtype", "fp64"]) == 0
        return json.loads(capsys.readouterr().out)

    return run_it


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which exits with 2, and return its message."""

    def run_it(*words: object) -> str:
        capsys.readouterr()
        assert run(["evaluate", *map(str, words)]) == 2
        return capsys.readouterr().err

    return run_it
