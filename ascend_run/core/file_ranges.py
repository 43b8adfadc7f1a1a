"""Read ranges of files, in full or not at all, and their checksums. Torch-free."""

from __future__ import annotations

import os
import zlib
from typing import Final

CHUNK_BYTES: Final = 8 << 20
"""Size of one read, write or checksum block, in bytes."""


def range_crc32(descriptor: int, begin: int, end: int) -> str:
    """Return the CRC-32 of a range of a file, as 8 hex digits.

    Raises:
        EOFError: The file ends before the range does.
    """
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - begin)))
    crc = 0
    for position in range(begin, end, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, end - position)]
        read_range(descriptor, chunk, position)
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def read_range(descriptor: int, target: memoryview, begin: int) -> None:
    """Fill ``target`` from a file, starting at byte ``begin``.

    Raises:
        EOFError: The file ends first.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], begin + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {begin + done}")
        done += count
