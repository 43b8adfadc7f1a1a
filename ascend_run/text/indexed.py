"""Megatron's token files, byte for byte: ``PREFIX.bin`` has the ids, ``PREFIX.idx`` the index.

Layout of the index, little-endian, without padding:

    9 bytes   magic
    uint64    version, 1
    uint8     code of the ids' dtype
    uint64    number of sequences, s
    uint64    number of entries in the document table, d
    int32[s]  tokens in each sequence
    int64[s]  byte at which each sequence begins in the .bin
    int64[d]  first sequence of each document, and s at the end

Written and validated here without torch or Megatron, so that data preparation and checks start
fast; tested against Megatron's own writer and reader. Source of the layout:
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ascend_run.plugin_api import DataError

from .dataset_paths import bin_path, idx_path

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES: Final = {name: code for code, name in _DTYPES.items()}
_FORMATS: Final = {"uint16": "H", "int32": "i"}
"""Formats of ``struct`` of the dtypes that are written."""
_WIDE_VOCABULARY: Final = 65500
"""Megatron stores ids as int32 if the vocabulary has at least this size."""


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size < _WIDE_VOCABULARY else "<i4")


class IndexedWriter:
    """Write a pair of token files; each document is one sequence.

    Args:
        bin_stream: Receives the ids.
        dtype: See ``dtype_for``.
    """

    def __init__(self, bin_stream: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._bin = bin_stream
        self._dtype = dtype
        self._limits = np.iinfo(dtype)
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Number of documents added so far."""
        return len(self._lengths)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[documents] tokens in each document added so far."""
        return np.array(self._lengths, dtype="<i4")

    def add(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append one document; it may be empty.

        Raises:
            OverflowError: An id does not fit the dtype.
        """
        if isinstance(ids, np.ndarray):
            limits = self._limits
            if len(ids) and not (limits.min <= ids.min() and ids.max() <= limits.max):
                raise self._too_large(ids)
            content = ids.astype(self._dtype).tobytes()
        else:
            try:
                content = struct.pack(f"<{len(ids)}{_FORMATS[self._dtype.name]}", *ids)
            except struct.error:
                raise self._too_large(ids) from None
        self._bin.write(content)
        self._digest.update(content)
        self._lengths.append(len(ids))
        self.tokens += len(ids)

    def _too_large(self, ids: Sequence[int] | NDArray[Any]) -> OverflowError:
        return OverflowError(f"token id {max(ids)} does not fit {self._dtype.name}")

    @property
    def bin_sha256(self) -> str:
        """SHA-256 of the ids added so far."""
        return self._digest.hexdigest()

    def index(self) -> bytes:
        """Return the content of the ``.idx`` for the documents added so far."""
        lengths = self.lengths
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        code = _CODES[self._dtype.name]
        header = _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        pointers = _pointers(lengths, self._dtype.itemsize)
        return b"".join((header, lengths.tobytes(), pointers.tobytes(), documents.tobytes()))


def _pointers(lengths: NDArray[Any], itemsize: int) -> NDArray[np.int64]:
    """Return the first byte of each sequence."""
    ends = np.cumsum(lengths, dtype="<i8") * itemsize
    return np.concatenate(([0], ends[:-1])).astype("<i8") if len(lengths) else ends


@attrs.frozen(kw_only=True, eq=False)
class TokenIndex:
    """A validated ``.idx``: its tables are consistent with each other and with its ``.bin``."""

    prefix: str
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    """Tokens in each sequence."""
    document_starts: NDArray[np.int64]
    """First sequence of each document, and the number of sequences at the end."""

    @property
    def documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def ids(self) -> NDArray[Any]:
        """Return all token ids, memory-mapped."""
        return np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")


def read_index(prefix: str | Path) -> TokenIndex:
    """Read an ``.idx`` and validate it against its ``.bin``: sizes, counts, pointers.

    Raises:
        DataError: A file is missing, truncated, of another format, or inconsistent.
    """
    need_token_files(prefix)
    path = idx_path(prefix)
    try:
        content = np.fromfile(path, dtype=np.uint8)
        bin_size = os.path.getsize(bin_path(prefix))
    except OSError as error:
        raise DataError(f"cannot read dataset {prefix}: {error}") from error
    if len(content) < len(MAGIC) or content[: len(MAGIC)].tobytes() != MAGIC:
        raise _foreign(path, f"it begins with {content[:9].tobytes()!r}, expected {MAGIC!r}")
    if len(content) < _HEADER.size:
        raise _truncated(path, _HEADER.size, len(content))
    _, version, code, sequences, entries = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != VERSION:
        raise _foreign(path, f"its version is {version}, expected {VERSION}")
    if code not in _DTYPES:
        raise _foreign(path, f"its dtype has code {code}, expected one of {sorted(_DTYPES)}")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if len(content) == expected + sequences and sequences:
        raise _foreign(path, "it has a table of modes, which only multimodal datasets have")
    if len(content) < expected:
        raise _truncated(path, expected, len(content))
    if len(content) > expected:
        raise _foreign(path, f"it has {len(content)} bytes, expected {expected}")
    buffer = content.data
    lengths = np.frombuffer(buffer, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(buffer, "<i8", sequences, _HEADER.size + 4 * sequences)
    starts = np.frombuffer(buffer, "<i8", entries, _HEADER.size + 12 * sequences)
    index = TokenIndex(
        prefix=str(prefix),
        dtype=np.dtype(_DTYPES[code]).newbyteorder("<"),
        lengths=lengths,
        document_starts=starts,
    )
    _check_numbers(path, index, pointers)
    expected = index.tokens * index.dtype.itemsize
    if bin_size < expected:
        raise _truncated(bin_path(prefix), expected, bin_size)
    if bin_size > expected:
        raise _foreign(bin_path(prefix), f"it has {bin_size} bytes where its index has {expected}")
    return index


def need_token_files(prefix: str | Path) -> None:
    """Raise DataError if a dataset has no ``.bin`` or no ``.idx``."""
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        hint = ""
        if str(prefix).endswith((".bin", ".idx")):
            hint = f"; a dataset is named by its prefix: {str(prefix)[:-4]}"
        raise DataError(
            f"dataset {prefix}: {' and '.join(missing)} not found{hint}; "
            "make datasets with ascend-run preprocess"
        )


def _check_numbers(path: Path, index: TokenIndex, pointers: NDArray[np.int64]) -> None:
    """Check that the three tables of an index are consistent."""
    lengths, starts = index.lengths, index.document_starts
    if len(lengths) and int(lengths.min()) < 0:
        raise _foreign(path, f"a sequence has {int(lengths.min())} tokens")
    if not np.array_equal(pointers, _pointers(lengths, index.dtype.itemsize)):
        raise _foreign(path, "its pointers do not follow from its lengths")
    if (
        not len(starts)
        or starts[0] != 0
        or starts[-1] != len(lengths)
        or np.any(np.diff(starts) < 0)
    ):
        raise _foreign(path, f"its documents do not cover its {len(lengths)} sequences")


def _foreign(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is corrupt or not Megatron's: {reason}; make the dataset again with "
        "ascend-run preprocess"
    )


def _truncated(path: Path, expected: int, seen: int) -> DataError:
    return DataError(
        f"{path} is truncated: {seen} bytes, expected {expected}; copy it again, or make the "
        "dataset again with ascend-run preprocess"
    )
