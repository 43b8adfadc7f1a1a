"""What ``ascend-run generate`` answers, of models that have no tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from ascend_run.entrypoints.cli import run


def write_words(folder: Path, vocab_size: int) -> Path:
    """Write a tokenizer of the words w0, w1, ... with these ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def generated(*words: object) -> list[dict[str, Any]]:
    """Run the command with ``--json``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(["generate", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in printed.getvalue().splitlines()]
