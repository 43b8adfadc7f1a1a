"""One rank's file of tensors in the safetensors format: streamed writes, ranged reads.

The safetensors package can read these files. It is not used to write them since it lacks three
things: a checksum of each tensor taken during the write, fsync, and no second copy of the tensors
in memory. Format: 8 bytes of header length (little-endian), a JSON header padded with spaces, then
the tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.core.file_ranges import CHUNK_BYTES
from ascend_run.plugin_api.contracts import TensorShard
from ascend_run.text import strict_json

from .boxes import Box
from .manifest import DTYPE_BYTES, StoredFile, StoredShard

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_MAX_HEADER: Final = 1 << 30


@attrs.frozen
class HeaderEntry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  #: Unit: bytes from the start of the file.
    end: int


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, row-major, as a flat uint8 tensor on the host.

    A view if the tensor is contiguous and on the host, else a copy.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def shard_box(shard: TensorShard) -> Box:
    """Return the box of the global tensor that a shard holds."""
    return Box(tuple(shard.offset), tuple(shard.tensor.shape))


def name_in_file(shard: TensorShard) -> str:
    """Return the name of a shard in its file: its key, plus its offset unless it is unsharded."""
    if tuple(shard.tensor.shape) == tuple(shard.global_shape):
        return shard.key
    return f"{shard.key}@{','.join(map(str, shard.offset))}"


def write_shard(
    path: str, shards: Sequence[TensorShard], metadata: Mapping[str, str]
) -> tuple[StoredFile, dict[str, list[StoredShard]]]:
    """Write and fsync a new file of shards.

    Args:
        metadata: Strings stored in the header.

    Returns:
        The manifest entries of the file and, by key, of its shards.

    Raises:
        OSError: Writing failed; a partial file may remain.
    """
    # Wider dtypes first keeps every tensor aligned to its element size.
    ordered = sorted(shards, key=lambda p: (-p.tensor.element_size(), name_in_file(p)))
    header = _header(ordered, metadata)
    stored: dict[str, list[StoredShard]] = {}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        size = _write_all(descriptor, memoryview(header))
        with ThreadPoolExecutor(1, "checkpoint-crc32") as checksums:
            for shard in ordered:
                tensor = shard.tensor if shard.read is None else shard.read()
                data = tensor_bytes(tensor).numpy().data
                crc = 0
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    checksum = checksums.submit(zlib.crc32, chunk, crc)  # overlaps with the write
                    size += _write_all(descriptor, chunk)
                    crc = checksum.result()
                stored.setdefault(shard.key, []).append(
                    StoredShard(
                        os.path.basename(path), name_in_file(shard), shard_box(shard), f"{crc:08x}"
                    )
                )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return StoredFile(size, hashlib.sha256(header).hexdigest()), stored


def _header(shards: Sequence[TensorShard], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for shard in shards:
        end = position + shard.tensor.numel() * shard.tensor.element_size()
        table[name_in_file(shard)] = {
            "dtype": DTYPE_NAMES[shard.tensor.dtype],
            "shape": list(shard.tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = strict_json.render(table).rstrip(b"\n")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
    return done


@contextlib.contextmanager
def open_shard(path: str) -> Iterator[int]:
    """Open a file of tensors for reading; symbolic links are rejected.

    Raises:
        OSError: The file cannot be opened, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_header(descriptor: int) -> tuple[str, dict[str, HeaderEntry]]:
    """Return the SHA-256 of a file's header, and its tensors.

    Raises:
        ValueError: The file is not safetensors, or its tensors do not fill it exactly.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER):
        raise ValueError(f"a header of {length} bytes does not fit a file of {size}")
    header = os.pread(descriptor, 8 + length, 0)
    table = strict_json.parse(header[8:])
    if not isinstance(table, dict):
        raise ValueError("the header is not a JSON object")
    entries = {name: _entry(name, e, 8 + length) for name, e in table.items() if name[:2] != "__"}
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise ValueError(f"tensor {name!r} begins at {entry.begin}, not at {position}")
        position = entry.end
    if position != size:
        raise ValueError(f"its tensors end at {position}, the file at {size}")
    return hashlib.sha256(header).hexdigest(), entries


def _entry(name: str, entry: Any, data_begin: int) -> HeaderEntry:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(position) + data_begin for position in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of tensor {name!r} is malformed") from None
    volume = Box((0,) * len(shape), shape).volume
    if dtype not in DTYPE_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"tensor {name!r} has dtype {dtype} and shape {list(shape)}")
    if end - begin != volume * DTYPE_BYTES[dtype]:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes, which does not match its shape")
    return HeaderEntry(dtype, shape, begin, end)
