"""Batches of documents, encoded in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ascend_run.text.documents import DocumentEncoder

from .documents import Document
from .workers import in_processes, useful_processes

_BATCH_DOCUMENTS: Final = 1024
_BATCH_CHARACTERS: Final = 2**20
"""Size of a batch, which one process encodes."""
_BYTES_PER_PROCESS: Final = 4 * 2**20

Ids: TypeAlias = list[NDArray[np.int32]]


def encoded_batches(
    documents: Iterator[tuple[Document, bool]],
    encoder: DocumentEncoder,
    workers: int,
    size_bytes: int,
) -> Iterator[tuple[Sequence[bool], Ids]]:
    """Yield whether each document of a batch is held out, and its ids, in order.

    Args:
        workers: Processes that encode, at most.
        size_bytes: Size of all documents.
    """
    batches = (
        ([held_out for _, held_out in batch], [document.text for document, _ in batch])
        for batch in _batches(documents)
    )
    processes = useful_processes(workers, size_bytes, _BYTES_PER_PROCESS)
    if processes > 1:
        yield from in_processes(batches, partial(_encode, encoder.content), processes)
        return
    for held_out, texts in batches:
        yield held_out, encoder.encode(texts)


def _encode(content: str) -> Callable[[Sequence[str]], Ids]:
    """Return what encodes texts in a worker process."""
    return DocumentEncoder(content).encode


def _batches(
    documents: Iterator[tuple[Document, bool]],
) -> Iterator[list[tuple[Document, bool]]]:
    """Batches of documents with about ``_BATCH_CHARACTERS`` characters."""
    while batch := list(islice(documents, 1)):
        characters = len(batch[0][0].text)
        while characters < _BATCH_CHARACTERS and len(batch) < _BATCH_DOCUMENTS:
            if (item := next(documents, None)) is None:
                break
            batch.append(item)
            characters += len(item[0].text)
        yield batch
