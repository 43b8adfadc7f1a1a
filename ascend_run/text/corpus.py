"""Drop empty and duplicate documents, and split the others into training and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import attrs

from .document_files import Document, InputFile, Reader

_DIGEST_BYTES: Final = 16
_BATCH_DOCUMENTS: Final = 1024
_BATCH_CHARACTERS: Final = 2**20
"""Size of a batch, which one process encodes."""


def content_digest(text: str) -> bytes:
    """Return a digest of a text, in which any run of whitespace counts as one space."""
    canonical = " ".join(text.split())
    return hashlib.blake2b(canonical.encode("utf-8"), digest_size=_DIGEST_BYTES).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document is held out.

    This depends only on its content, so that adding, moving or renaming files does not affect other
    documents, and duplicates are always in the same part.
    """
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@attrs.define
class Corpus:
    """The distinct documents of some files.

    Memory: about 100 bytes per distinct document.

    Args:
        holdout: Fraction of the documents to hold out.
    """

    files: Sequence[InputFile]
    reader: Reader
    holdout: float = 0.0
    duplicates: int = attrs.field(default=0, init=False)
    """Duplicates dropped by the last ``read``."""
    empty: int = attrs.field(default=0, init=False)
    """Empty documents dropped by the last ``read``."""

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)

    def read(self) -> Iterator[tuple[Document, bool]]:
        """Yield each document and whether it is held out, in the order of the files.

        Raises:
            DataError: As ``Reader.read`` does.
        """
        self.duplicates = self.empty = 0
        seen: set[bytes] = set()
        for document in self.reader.read(self.files):
            if not document.text or document.text.isspace():
                self.empty += 1
                continue
            digest = content_digest(document.text)
            if digest in seen:
                self.duplicates += 1
                continue
            seen.add(digest)
            yield document, is_held_out(digest, self.holdout)


def document_batches(
    documents: Iterator[tuple[Document, bool]],
) -> Iterator[list[tuple[Document, bool]]]:
    """Yield batches of what ``Corpus.read`` yields, with about ``_BATCH_CHARACTERS`` characters."""
    while batch := list(islice(documents, 1)):
        characters = len(batch[0][0].text)
        while characters < _BATCH_CHARACTERS and len(batch) < _BATCH_DOCUMENTS:
            if (item := next(documents, None)) is None:
                break
            batch.append(item)
            characters += len(item[0].text)
        yield batch
