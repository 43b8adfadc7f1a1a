"""Encode files of plain text to the documents of token files, once per set of files. No torch.

The documents and their ids are those that ``preprocess`` writes of the same files. The results are
stored in the run's cache; later runs verify the cached arrays and map them into memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from ascend_run.plugin_api import ArrayCache, Arrays, DataError

from .corpus import Corpus, document_batches
from .indexed import dtype_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .document_files import InputFile
    from .text_source import TextSource
    from .tokenizer import TextTokenizer

_FORMAT: Final = 1


@attrs.frozen(kw_only=True, eq=False)
class EncodedDocuments:
    """Documents of token ids, with the interface of Megatron's IndexedDataset that samples need."""

    ids: NDArray[Any]
    """[tokens]"""
    sequence_lengths: NDArray[np.int32]
    """[documents]. Unit: tokens."""
    report: Mapping[str, int]
    """``documents``, ``duplicates`` and ``empty``: how many were kept, and dropped."""
    _begins: NDArray[np.int64] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        object.__setattr__(self, "_begins", ends - self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a part of a document, by default from ``offset`` to its end. Unit: tokens."""
        begin = int(self._begins[index]) + offset
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        return self.ids[begin : begin + length]


def encoded_documents(
    source: TextSource, tokenizer: TextTokenizer, cache: ArrayCache
) -> EncodedDocuments:
    """Return the documents of a source, from the cache if they were encoded before.

    Raises:
        DataError: A file or row cannot be read (lists all), or there are no documents.
        StorageError: The cache cannot be read or written.
    """
    files = source.files()
    eod = tokenizer.eod if source.append_eod else None
    description = {
        "kind": "documents",
        "format": _FORMAT,
        "files": [[file.format, file.sha256()] for file in files],
        "key": source.key,
        "tokenizer": tokenizer.fingerprint,
        "eod": eod,
    }
    arrays = cache.arrays(description, lambda: _encode(source, files, tokenizer, eod))
    return EncodedDocuments(
        ids=arrays["ids"],
        sequence_lengths=arrays["lengths"],
        report=json.loads(arrays["report"].tobytes()),
    )


def _encode(
    source: TextSource, files: Sequence[InputFile], tokenizer: TextTokenizer, eod: int | None
) -> Arrays:
    corpus = Corpus(files, source.reader())
    end = np.array([] if eod is None else [eod], dtype=np.int32)
    dtype = dtype_for(tokenizer.vocab_size)
    ids: list[NDArray[Any]] = []
    for batch in document_batches(corpus.read()):
        if corpus.reader.problems:  # raised at the end of the files
            continue
        encoded = tokenizer.encoder.encode([document.text for document, _ in batch])
        ids += [np.concatenate((each, end)).astype(dtype) for each in encoded]
    if not ids:
        raise DataError(
            f"no documents in {source.path}: {corpus.empty} were empty; name files with text"
        )
    report = {"documents": len(ids), "duplicates": corpus.duplicates, "empty": corpus.empty}
    return {
        "ids": np.concatenate(ids),
        "lengths": np.array([len(each) for each in ids], dtype=np.int32),
        "report": np.frombuffer(json.dumps(report).encode(), np.uint8),
    }
