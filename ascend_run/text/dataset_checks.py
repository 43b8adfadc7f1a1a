"""Check datasets before a run starts: consistency of files, sidecar and tokenizer.

Imports no torch. Cost: reads the full index; token ids are read in full up to ``WHOLE_CHECK_BYTES``
(a fraction of a second), of larger files ``WINDOWS`` samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from ascend_run.plugin_api import DataError, RunConfig
from ascend_run.text.dataset_paths import bin_path, idx_path, is_source, sidecar_path
from ascend_run.text.indexed import TokenIndex, read_index
from ascend_run.text.sidecar import FileDigest, Sidecar, read_sidecar
from ascend_run.text.tokenizer import TextTokenizer, load_tokenizer

WHOLE_CHECK_BYTES: Final = 64 * 2**20
"""Token files up to this size are checked in full."""
WINDOWS: Final = 64
_WINDOW_TOKENS: Final = 2**15


@attrs.frozen(kw_only=True)
class DatasetFacts:
    """Properties of a valid dataset."""

    prefix: str
    documents: int
    tokens: int
    dtype: str
    sidecar: Sidecar | None


@attrs.frozen(kw_only=True)
class DataFacts:
    """Common properties of a run's data."""

    vocab_size: int | None
    """Token ids are below this; None if neither a tokenizer nor a sidecar defines it."""
    eod: int | None
    """Id of the end-of-document token."""
    tokenizer_sha256: str | None
    datasets: Mapping[str, DatasetFacts]


def check_dataset(
    prefix: str | Path, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> DatasetFacts:
    """Check that a dataset is complete, valid and made with the run's tokenizer.

    A dataset without a sidecar, as written by Megatron's own tool, is allowed with a warning.

    Args:
        tokenizer_fingerprint: Fingerprint of the run's tokenizer; None skips the comparison.
        vocab_size: Token ids must be below this; default: the sidecar's value.

    Raises:
        DataError: A check failed; states the file, the expected value and the fix.
    """
    index = read_index(prefix)
    if not index.tokens:
        raise DataError(f"dataset {prefix} holds no tokens; give preprocess some documents")
    sidecar = read_sidecar(prefix)
    problems: list[str] = []
    if sidecar is None:
        _warn_of_missing_record(prefix)
    else:
        problems += _record_problems(prefix, index, sidecar, tokenizer_fingerprint)
        if vocab_size is None:
            vocab_size = sidecar.vocab_size
    if vocab_size is not None:
        problems += _range_problems(index, vocab_size)
    if problems:
        raise DataError(f"dataset {prefix} cannot be used", problems)
    return DatasetFacts(
        prefix=str(prefix),
        documents=index.documents,
        tokens=index.tokens,
        dtype=index.dtype.name,
        sidecar=sidecar,
    )


def check_data(config: RunConfig) -> DataFacts:
    """Check the tokenizer and every dataset of ``[data]``; a task checks its own sources.

    Raises:
        DataError: Lists all problems of all datasets.
    """
    problems: list[str] = []
    tokenizer: TextTokenizer | None = None
    if config.data.tokenizer is not None:
        try:
            tokenizer = load_tokenizer(config.data.tokenizer)
        except DataError as error:
            problems.append(str(error))
    fingerprint = tokenizer.fingerprint if tokenizer else None
    vocab_size = tokenizer.vocab_size if tokenizer else None
    facts: dict[str, DatasetFacts] = {}
    names = dict.fromkeys((*config.data.train, *config.data.validation))
    for prefix in (name for name in names if not is_source(name)):
        try:
            facts[prefix] = check_dataset(prefix, fingerprint, vocab_size)
        except DataError as error:
            problems += error.problems or (error.headline,)
    records = [fact.sidecar for fact in facts.values() if fact.sidecar is not None]
    if tokenizer is None and not problems:
        problems += _tokenizer_mismatches(records)
    if vocab_size is None and records:
        vocab_size = records[0].vocab_size
    eod = tokenizer.eod if tokenizer else None
    if eod is None and records:
        eod = records[0].eod
    problems += _model_problems(config, vocab_size)
    if config.data.eod_mask_loss and eod is None:
        problems.append(
            "data.eod_mask_loss: no end-of-document token is known; name the tokenizer with "
            "data.tokenizer=PATH, or set data.eod_mask_loss=false"
        )
    if problems:
        raise DataError("the data of this run cannot be used", problems)
    return DataFacts(
        vocab_size=vocab_size,
        eod=eod,
        tokenizer_sha256=fingerprint or (records[0].tokenizer_sha256 if records else None),
        datasets=facts,
    )


def _record_problems(
    prefix: str | Path, index: TokenIndex, sidecar: Sidecar, fingerprint: str | None
) -> Iterator[str]:
    again = "make the dataset again with ascend-run preprocess"
    if fingerprint is not None and fingerprint != sidecar.tokenizer_sha256:
        yield (
            f"{sidecar_path(prefix)}: made with tokenizer {sidecar.tokenizer_sha256[:12]}, but "
            f"data.tokenizer is {fingerprint[:12]}; name the tokenizer that it was made with, or "
            f"{again}"
        )
    seen = (index.documents, index.tokens, index.dtype.name)
    recorded = (sidecar.documents, sidecar.tokens, sidecar.dtype)
    if seen != recorded:
        yield (
            f"{idx_path(prefix)}: {seen[0]} documents, {seen[1]} tokens of {seen[2]}, expected "
            f"{recorded[0]}, {recorded[1]} of {recorded[2]}; {again}"
        )
        return
    files = [(idx_path(prefix), sidecar.idx)]
    if sidecar.bin.size_bytes <= WHOLE_CHECK_BYTES:
        files.append((bin_path(prefix), sidecar.bin))
    for path, recorded_digest in files:
        digest = FileDigest.of(path)
        if digest != recorded_digest:
            yield (
                f"{path} is corrupt: SHA-256 {digest.sha256[:12]}, expected "
                f"{recorded_digest.sha256[:12]}; copy it again, or {again}"
            )


def _range_problems(index: TokenIndex, vocab_size: int) -> Iterator[str]:
    ids = index.ids()
    if ids.nbytes <= WHOLE_CHECK_BYTES:
        windows = [ids]
    else:
        starts = np.linspace(0, len(ids) - _WINDOW_TOKENS, WINDOWS).astype(np.int64)
        windows = [ids[start : start + _WINDOW_TOKENS] for start in starts]
    largest = max(int(window.max()) for window in windows)
    smallest = min(int(window.min()) for window in windows)
    seen = smallest if smallest < 0 else largest
    if not 0 <= seen < vocab_size:
        yield (
            f"{bin_path(index.prefix)} holds token id {seen}, expected ids from 0 to "
            f"{vocab_size - 1}; it was made with another tokenizer, or is corrupt"
        )


def _tokenizer_mismatches(records: list[Sidecar]) -> Iterator[str]:
    """Without a tokenizer in the config, compare the sidecars with each other."""
    if len({record.tokenizer_sha256 for record in records}) > 1:
        names = ", ".join(sorted({record.tokenizer_sha256[:12] for record in records}))
        yield (
            f"data.train and data.validation were made with different tokenizers ({names}); "
            "make them with one tokenizer"
        )


def _model_problems(config: RunConfig, vocab_size: int | None) -> Iterator[str]:
    rows = config.model.vocab_size
    if rows is not None and vocab_size is not None and vocab_size > rows:
        yield (
            f"model.vocab_size is {rows}, but the tokenizer has {vocab_size} tokens; set "
            f"model.vocab_size={vocab_size}"
        )


def _warn_of_missing_record(prefix: str | Path) -> None:
    import structlog

    structlog.get_logger().warning(
        "dataset.without_record",
        dataset=str(prefix),
        meaning="its tokenizer cannot be compared with data.tokenizer",
    )
