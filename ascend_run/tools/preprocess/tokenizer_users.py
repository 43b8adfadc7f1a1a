"""Which datasets would be unreadable if a tokenizer were replaced, by what their records say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ascend_run.plugin_api import DataError
from ascend_run.text.dataset_paths import idx_path
from ascend_run.text.sidecar import Sidecar, read_sidecar
from ascend_run.text.tokenizer import fingerprint_of


def datasets_made_with(tokenizer: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """Prefixes of the datasets in some folders whose records have the fingerprint of a tokenizer.

    Datasets without a record name no tokenizer and are passed over.

    Args:
        tokenizer: A ``tokenizer.json``; one that is missing or none has no datasets.
    """
    try:
        fingerprint = fingerprint_of(tokenizer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for index in sorted(folder.glob(f"*{idx_path('')}")):
            record = _record(index.with_suffix(""))
            if record is not None and record.tokenizer_sha256 == fingerprint:
                yield index.with_suffix("")


def _record(prefix: Path) -> Sidecar | None:
    try:
        return read_sidecar(prefix)
    except DataError:  # another program's file of that name
        return None
