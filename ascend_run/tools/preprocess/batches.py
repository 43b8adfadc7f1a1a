"""Batches of documents, encoded in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ascend_run.text.corpus import document_batches
from ascend_run.text.document_files import Document
from ascend_run.text.documents import DocumentEncoder

from .workers import in_processes, useful_processes

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
        for batch in document_batches(documents)
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
