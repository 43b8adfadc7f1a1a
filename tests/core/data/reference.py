"""Token files read and written with nothing but ``struct``, to compare with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

_FORMATS = {8: "H", 4: "i"}


def read_documents(prefix: Path) -> list[list[int]]:
    """Every document, token by token."""
    index = Path(f"{prefix}.idx").read_bytes()
    content = Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    place = 34
    lengths = struct.unpack_from(f"<{sequences}i", index, place)
    pointers = struct.unpack_from(f"<{sequences}q", index, place + 4 * sequences)
    starts = struct.unpack_from(f"<{entries}q", index, place + 12 * sequences)
    assert list(starts) == list(range(sequences + 1))
    return [
        list(struct.unpack_from(f"<{length}{_FORMATS[code]}", content, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


def samples_in_order(
    documents: Sequence[Sequence[int]], order: Sequence[int], seq_length: int
) -> list[list[int]]:
    """Windows of ``seq_length + 1`` tokens over the joined documents, ``seq_length`` apart."""
    stream = [token for document in order for token in documents[document]]
    count = (len(stream) - 1) // seq_length
    return [stream[i * seq_length : (i + 1) * seq_length + 1] for i in range(count)]
