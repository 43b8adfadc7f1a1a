"""Prepared data for a run that only has to start: made by the preprocess command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .protocol import run

VOCAB_SIZE = 300


def make_tiny_data(folder: Path, command: Sequence[str | Path]) -> Path:
    """Write ``folder/data`` with token files and a tokenizer; the path prefix of the former.

    Args:
        command: How ascend-run is started.

    Raises:
        NotMeasured: The command failed.
    """
    text = folder / "text"
    text.mkdir(parents=True)
    for index in range(40):
        (text / f"{index}.txt").write_text(f"line {index} of a text\n" * (20 + index))
    data = folder / "data" / "train"
    source = ["--input", text, "--format", "text", "--train-tokenizer", str(VOCAB_SIZE)]
    run([*command, "preprocess", *source, "--output-prefix", data], folder)
    return data
