"""``fingerprint.jsonl``: one line per optimizer step, across any number of resumes.

Written like ``metrics.jsonl``: a ``start`` or ``resume`` event begins an attempt and supersedes
lines that earlier attempts wrote for later steps; ``tools.pages.fingerprint_file`` reads it.
Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ascend_run.core.log.metrics import MetricsWriter

FILE_NAME: Final = "fingerprint.jsonl"
FORMAT: Final = 1
"""Incremented if the hashing changes; hashes of different formats cannot be compared."""


def writer(folder: Path, start: int) -> MetricsWriter:
    """Start an attempt in the file of a run folder.

    Args:
        start: Step of the checkpoint that the run resumes from; 0 without one.

    Raises:
        StorageError: The file cannot be written.
    """
    return MetricsWriter(folder / FILE_NAME, start or None, about={"format": FORMAT})
