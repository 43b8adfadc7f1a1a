"""Which documents count: empty ones and copies go, and each is for training or held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from .documents import Document, InputFile, Reader

_DIGEST_BYTES: Final = 16


def content_digest(text: str) -> bytes:
    """What tells two texts apart: every run of white space counts as one space."""
    canonical = " ".join(text.split())
    return hashlib.blake2b(canonical.encode("utf-8"), digest_size=_DIGEST_BYTES).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether the content falls into the held-out fraction.

    It depends on the content alone, so that adding, moving or renaming files moves no other
    document, and copies of a text are always on the same side.
    """
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@attrs.define
class Corpus:
    """The documents of some files, each content once.

    Memory: about 100 bytes a distinct document.

    Args:
        holdout: Fraction of the documents to hold out.
    """

    files: Sequence[InputFile]
    reader: Reader
    holdout: float = 0.0
    duplicates: int = attrs.field(default=0, init=False)
    """Copies dropped by the last reading."""
    empty: int = attrs.field(default=0, init=False)
    """Documents of nothing but white space dropped by the last reading."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def read(self) -> Iterator[tuple[Document, bool]]:
        """Each document and whether it is held out, in the order of the files.

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
