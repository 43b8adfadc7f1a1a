"""Text files in, a tokenizer and token files out: all of it published, or nothing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import attrs

import ascend_run
from ascend_run.plugin_api import ConfigError, DataError

from .corpus import Corpus
from .documents import Document, Reader, find_files
from .indexed import IndexedWriter, bin_path, dtype_for, idx_path
from .publish import StagedFiles
from .sidecar import FileDigest, Sidecar, encode_sidecar, sidecar_path
from .tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

_BATCH_DOCUMENTS: Final = 1024
_BATCH_CHARACTERS: Final = 4 * 2**20
"""A batch is encoded on all threads at once; large enough to keep them busy."""

_PROGRESS_STEPS: Final = 500

Progress = Callable[[str, int, int], None]
"""Told of the stage, and of the bytes done and to be done in it."""


def _silent(stage: str, done: int, total: int) -> None:
    """No progress is wanted."""


@attrs.frozen(kw_only=True)
class PreprocessOptions:
    """What to read and where to write.

    Exactly one of ``tokenizer`` and ``train_vocab_size`` is set.
    """

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer: Path | None = None
    train_vocab_size: int | None = None
    """Train a tokenizer of this size on the training part."""
    tokenizer_out: Path | None = None
    """Where the trained one goes; default: ``tokenizer.json`` beside the output."""
    end_token: str | None = None
    format: str = "auto"
    json_key: str = "text"
    append_eod: bool = True
    """End every document with the end-of-document token."""
    holdout: float = 0.0
    """Fraction of the documents to hold out."""
    heldout_prefix: Path | None = None
    """Default: the output prefix and ``-heldout``."""
    skip_undecodable: bool = False
    overwrite: bool = False

    def problems(self) -> Iterator[str]:
        """What contradicts itself or is out of range."""
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            yield "give either --tokenizer PATH or --train-tokenizer VOCAB_SIZE"
        if self.tokenizer_out is not None and self.train_vocab_size is None:
            yield "--tokenizer-out is for --train-tokenizer; leave it out"
        if not 0.0 <= self.holdout < 1.0:
            yield f"--holdout must be at least 0 and below 1, got {self.holdout}"
        if self.heldout_prefix is not None and not self.holdout:
            yield "--heldout-prefix is for --holdout FRACTION; give a fraction, or leave it out"
        if self.heldout_prefix == self.output_prefix:
            yield f"--heldout-prefix and --output-prefix are both {self.output_prefix}"


@attrs.frozen(kw_only=True)
class PartReport:
    """One pair of token files that was written."""

    prefix: str
    documents: int
    tokens: int


@attrs.frozen(kw_only=True)
class PreprocessReport:
    """What was read, left out and written."""

    train: PartReport
    heldout: PartReport | None
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    files: int
    input_bytes: int
    duplicates: int
    """Documents dropped as copies of another."""
    empty: int
    """Documents dropped as nothing but white space."""
    undecodable: tuple[str, ...]
    """Files left out because they are not in their encoding."""
    seconds: float


def preprocess(options: PreprocessOptions, progress: Progress = _silent) -> PreprocessReport:
    """Tokenise documents into Megatron's token files, with a record beside each pair.

    The result depends on the content of the files alone, not on threads or batches.

    Raises:
        ConfigError: Options that contradict each other.
        DataError: Input that cannot be read, a tokenizer without an end of document.
        StorageError: Output that cannot be written; then nothing is published.
    """
    if problems := list(options.problems()):
        raise ConfigError("cannot preprocess", problems)
    begun = time.monotonic()
    corpus = Corpus(
        find_files(options.inputs, options.format),
        Reader(options.json_key, options.skip_undecodable),
        options.holdout,
    )
    tokenizer, tokenizer_path = _tokenizer(options, corpus, progress)
    if options.append_eod and tokenizer.eod is None:
        raise DataError(
            f"tokenizer {tokenizer_path} has no end-of-document token that is known; name one with "
            "--end-token, or pass --no-append-eod"
        )
    with StagedFiles(overwrite=options.overwrite) as staged:
        if options.tokenizer is None:
            staged.open(tokenizer_path).write(tokenizer.to_json().encode())
        parts = [_Part(options.output_prefix, staged, tokenizer, options.append_eod)]
        if options.holdout:
            prefix = options.heldout_prefix or Path(f"{options.output_prefix}-heldout")
            parts.append(_Part(prefix, staged, tokenizer, options.append_eod))
        _tokenise(corpus, tokenizer, parts, progress)
        _need_documents(parts, options.holdout, corpus)
        for part in parts:
            part.finish()
        staged.publish()
    reports = [part.report() for part in parts]
    return PreprocessReport(
        train=reports[0],
        heldout=reports[1] if len(reports) > 1 else None,
        tokenizer=str(tokenizer_path),
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        files=len(corpus.files),
        input_bytes=corpus.size_bytes,
        duplicates=corpus.duplicates,
        empty=corpus.empty,
        undecodable=tuple(corpus.reader.undecodable),
        seconds=time.monotonic() - begun,
    )


class _Part:
    """One pair of token files under way."""

    def __init__(
        self, prefix: Path, staged: StagedFiles, tokenizer: TextTokenizer, append_eod: bool
    ) -> None:
        self._prefix = prefix
        self._staged = staged
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self._dtype = dtype_for(tokenizer.vocab_size)
        self._writer = IndexedWriter(staged.open(bin_path(prefix)), self._dtype)

    @property
    def documents(self) -> int:
        return self._writer.documents

    def add(self, ids: list[int]) -> None:
        if self._append_eod:
            assert self._tokenizer.eod is not None
            ids.append(self._tokenizer.eod)
        self._writer.add(ids)

    def finish(self) -> None:
        """Write the index, and after it the record."""
        writer = self._writer
        index = writer.index()
        self._staged.open(idx_path(self._prefix)).write(index)
        sidecar = Sidecar(
            tokenizer_sha256=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            eod=self._tokenizer.eod,
            append_eod=self._append_eod,
            dtype=self._dtype.name,
            documents=writer.documents,
            tokens=writer.tokens,
            bin=FileDigest(
                size_bytes=writer.tokens * self._dtype.itemsize, sha256=writer.bin_sha256
            ),
            idx=FileDigest(size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()),
            ascend_run_version=ascend_run.__version__,
        )
        self._staged.open(sidecar_path(self._prefix)).write(encode_sidecar(sidecar))

    def report(self) -> PartReport:
        return PartReport(
            prefix=str(self._prefix), documents=self._writer.documents, tokens=self._writer.tokens
        )


def _tokenizer(
    options: PreprocessOptions, corpus: Corpus, progress: Progress
) -> tuple[TextTokenizer, Path]:
    """The tokenizer and its place; a trained one sees the training part only."""
    if options.train_vocab_size is None:
        assert options.tokenizer is not None
        return load_tokenizer(options.tokenizer, options.end_token), options.tokenizer
    path = options.tokenizer_out or options.output_prefix.with_name("tokenizer.json")
    documents = _with_progress(corpus, "training the tokenizer", progress)
    texts = (document.text for document, held_out in documents if not held_out)
    return train_tokenizer(texts, options.train_vocab_size), path


def _tokenise(
    corpus: Corpus, tokenizer: TextTokenizer, parts: Sequence[_Part], progress: Progress
) -> None:
    for batch in _batches(_with_progress(corpus, "tokenising", progress)):
        encoded = tokenizer.encode_batch([document.text for document, _ in batch])
        for (_, held_out), ids in zip(batch, encoded, strict=True):
            parts[held_out].add(ids)


def _with_progress(
    corpus: Corpus, stage: str, progress: Progress
) -> Iterator[tuple[Document, bool]]:
    total = corpus.size_bytes
    done = shown = 0
    progress(stage, 0, total)
    for document, held_out in corpus.read():
        yield document, held_out
        done += document.read_bytes
        if done - shown > total // _PROGRESS_STEPS:
            progress(stage, done, total)
            shown = done
    progress(stage, total, total)


def _batches(
    documents: Iterator[tuple[Document, bool]],
) -> Iterator[list[tuple[Document, bool]]]:
    """Groups of documents of about ``_BATCH_CHARACTERS``."""
    while batch := list(islice(documents, 1)):
        characters = len(batch[0][0].text)
        while characters < _BATCH_CHARACTERS and len(batch) < _BATCH_DOCUMENTS:
            if (item := next(documents, None)) is None:
                break
            batch.append(item)
            characters += len(item[0].text)
        yield batch


def _need_documents(parts: Sequence[_Part], holdout: float, corpus: Corpus) -> None:
    total = sum(part.documents for part in parts)
    if not total:
        raise DataError(
            f"no documents in {len(corpus.files)} files: {corpus.empty} were empty; give files "
            "with text"
        )
    for part, name in zip(parts, ("for training", "held out"), strict=False):
        if not part.documents:
            raise DataError(
                f"of {total} documents none is {name} at --holdout {holdout}; give more documents "
                "or another fraction"
            )
