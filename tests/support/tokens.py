"""A small dataset on disk."""

from __future__ import annotations

import random
from pathlib import Path

from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for


def write_tokens(folder: Path, vocab_size: int = 90) -> str:
    """Write 40 documents, 800 tokens in all, and return the prefix (``FOLDER/tokens``)."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / "tokens")
    drawn = random.Random(3)
    with bin_path(prefix).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(vocab_size))
        for _ in range(40):
            writer.add([drawn.randrange(vocab_size) for _ in range(20)])
    idx_path(prefix).write_bytes(writer.index())
    return prefix
