"""Tokenize text files; publish the tokenizer and the token files atomically."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import ascend_run
from ascend_run.plugin_api import ConfigError, DataError
from ascend_run.text.corpus import Corpus
from ascend_run.text.dataset_paths import bin_path, idx_path, sidecar_path
from ascend_run.text.document_files import Document, Reader, find_files
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.text.sidecar import FileDigest, Sidecar, encode_sidecar
from ascend_run.text.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from ascend_run.tools.preprocess.options import PreprocessOptions

from .batches import encoded_batches
from .lengths import Lengths
from .report import PartReport, PreprocessReport
from .staged_files import StagedFiles

_PROGRESS_STEPS: Final = 500

Progress = Callable[[str, int, int], None]
"""Progress callback: name of the stage, bytes done, total bytes."""


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def preprocess(options: PreprocessOptions, progress: Progress = _silent) -> PreprocessReport:
    """Tokenize documents to Megatron's token files, with a metadata file for each pair.

    The result depends only on the content of the files, not on threads or batches.

    Raises:
        ConfigError: Options contradict each other, or output would overwrite an input.
        DataError: Input cannot be read, or the tokenizer has no end-of-document token.
        StorageError: Output cannot be written; nothing is published then.
    """
    begun = time.monotonic()
    problems = list(options.problems())
    files = [] if problems else find_files(options.inputs, options.format)
    if problems := [*problems, *options.collisions(files)]:
        raise ConfigError("cannot preprocess", problems)
    corpus = Corpus(
        files,
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
        parts = [
            _Part(prefix, staged, tokenizer, options.append_eod)
            for prefix in options.prefixes().values()
        ]
        _tokenise(corpus, tokenizer, parts, options.workers, progress)
        _need_documents(parts, options.holdout, corpus)
        for part in parts:
            part.finish()
        reports = [part.report() for part in parts]
        report = PreprocessReport(
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
        if options.report is not None:
            staged.open(options.report).write(report.page().render().encode())
        staged.publish()
    return report


class _Part:
    """A pair of token files that is being written."""

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

    def add(self, ids: NDArray[np.int32]) -> None:
        if self._append_eod:
            assert self._tokenizer.eod is not None
            ids = np.append(ids, np.int32(self._tokenizer.eod))
        self._writer.add(ids)

    def finish(self) -> None:
        """Write the index, then the metadata file."""
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
            prefix=str(self._prefix),
            documents=self._writer.documents,
            tokens=self._writer.tokens,
            lengths=Lengths.of(self._writer.lengths),
        )


def _tokenizer(
    options: PreprocessOptions, corpus: Corpus, progress: Progress
) -> tuple[TextTokenizer, Path]:
    """Load the tokenizer, or train it on the training documents; return it and its path."""
    path = options.trained_tokenizer()
    if path is None or options.train_vocab_size is None:
        assert options.tokenizer is not None
        return load_tokenizer(options.tokenizer, options.end_token), options.tokenizer
    documents = _with_progress(corpus, "training the tokenizer", progress)
    texts = (document.text for document, held_out in documents if not held_out)
    return train_tokenizer(texts, options.train_vocab_size), path


def _tokenise(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    parts: Sequence[_Part],
    workers: int,
    progress: Progress,
) -> None:
    documents = _with_progress(corpus, "tokenising", progress)
    encoded = encoded_batches(documents, tokenizer.encoder, workers, corpus.size_bytes)
    for held_out, documents_ids in encoded:
        for part, ids in zip(held_out, documents_ids, strict=True):
            parts[part].add(ids)


def _with_progress(
    corpus: Corpus, stage: str, progress: Progress
) -> Iterator[tuple[Document, bool]]:
    total = corpus.size_bytes
    done = shown = 0
    progress(stage, 0, total)
    for document, held_out in corpus.read():
        yield document, held_out
        # The text of a compressed file may be larger than the file.
        done = min(done + document.read_bytes, total)
        if done - shown > total // _PROGRESS_STEPS:
            progress(stage, done, total)
            shown = done
    progress(stage, total, total)


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
