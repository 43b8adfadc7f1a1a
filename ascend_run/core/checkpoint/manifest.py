"""``manifest.json``: contents of a checkpoint, locations of its shards, checksums.

Torch-free, so that listing checkpoints does not import torch. The file has a canonical encoding and
holds the SHA-256 of its own content, so that any changed byte is detected.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ascend_run.text import strict_json

from .boxes import Box, tiling_problem

FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Sizes of the dtypes in bytes, by safetensors name."""

_SHARD_NAME: Final = re.compile(r"rank_\d{4,}\.safetensors")
_LIMIT: Final = 2**62


@attrs.frozen
class StoredShard:
    """One stored shard of a tensor and its location."""

    file: str
    name: str  #: Name of the tensor in its safetensors file.
    box: Box
    crc32: str  #: CRC-32 of its bytes, 8 hex digits.


@attrs.frozen
class StoredTensor:
    """One global tensor."""

    dtype: str
    global_shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]


@attrs.frozen
class StoredFile:
    """One file of tensors."""

    size: int  #: Unit: bytes.
    header_sha256: str


@attrs.frozen(kw_only=True)
class Manifest:
    """Everything about a checkpoint except the tensor data."""

    step: int
    save_id: str
    """Random id of the save, also stored in the files to detect a file of another save."""
    layout: Mapping[str, int]  #: Parallel sizes of the run that saved it, including ``world_size``.
    versions: Mapping[str, str]
    values: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]

    @functools.cached_property
    def by_file(self) -> Mapping[str, list[tuple[str, StoredTensor, StoredShard]]]:
        """Maps each file to (key, tensor, shard) of everything it holds."""
        table: dict[str, list[tuple[str, StoredTensor, StoredShard]]] = {f: [] for f in self.files}
        for key, tensor in self.tensors.items():
            for shard in tensor.shards:
                table[shard.file].append((key, tensor, shard))
        return table

    def render(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        content = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "save_id": self.save_id,
            "layout": dict(self.layout),
            "versions": dict(self.versions),
            "values": dict(self.values),
            "tensors": {key: _tensor_to_json(tensor) for key, tensor in self.tensors.items()},
            "files": {name: attrs.asdict(file) for name, file in self.files.items()},
        }
        return strict_json.render({**content, "sha256": _sha256(content)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Parse ``manifest.json``.

        Raises:
            ValueError: The bytes are not what ``render`` returns, or are inconsistent.
        """
        content = strict_json.parse(data)
        _expect(isinstance(content, dict), "it is not a JSON object")
        version = content.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(f"it has format {version}, from a newer ascend-run; this one reads 1")
        _expect(version == FORMAT_VERSION, f"its format_version is {version!r}, not 1")
        rest = {key: value for key, value in content.items() if key != "sha256"}
        _expect(
            content.get("sha256") == _sha256(rest) and strict_json.render(content) == data,
            "its content does not match its own sha256: it was changed after it was written",
        )
        files = _table(content, "files", _file_from_json)
        for name in files:
            _expect(
                _SHARD_NAME.fullmatch(name) is not None,
                f"{name!r} is not the plain name of a shard",
            )
        tensors = _table(content, "tensors", _tensor_from_json)
        _check_tensors(tensors, files)
        return cls(
            step=_count(content.get("step"), "step"),
            save_id=_text(content.get("save_id"), "save_id"),
            layout=_table(content, "layout", _count),
            versions=_table(content, "versions", _text),
            values=_table(content, "values", lambda value, name: value),
            tensors=tensors,
            files=files,
        )


def _check_tensors(tensors: Mapping[str, StoredTensor], files: Mapping[str, StoredFile]) -> None:
    places: set[tuple[str, str]] = set()
    for key, tensor in tensors.items():
        _expect(tensor.dtype in DTYPE_BYTES, f"tensor {key!r}: unknown dtype {tensor.dtype!r}")
        problem = tiling_problem(tensor.global_shape, [shard.box for shard in tensor.shards])
        _expect(problem is None, f"tensor {key!r}: {problem}")
        for shard in tensor.shards:
            _expect(shard.file in files, f"tensor {key!r}: no file {shard.file!r} is listed")
            _expect(
                (shard.file, shard.name) not in places,
                f"tensor {key!r}: {shard.name!r} in {shard.file} is used twice",
            )
            places.add((shard.file, shard.name))


def _sha256(content: Mapping[str, object]) -> str:
    return hashlib.sha256(strict_json.render(content)).hexdigest()


def _tensor_to_json(tensor: StoredTensor) -> dict[str, object]:
    shards = [
        {
            "file": shard.file,
            "name": shard.name,
            "offset": list(shard.box.offset),
            "shape": list(shard.box.shape),
            "crc32": shard.crc32,
        }
        for shard in tensor.shards
    ]
    return {"dtype": tensor.dtype, "global_shape": list(tensor.global_shape), "pieces": shards}


def _tensor_from_json(value: Any, name: str) -> StoredTensor:
    _expect(isinstance(value, dict), f"{name} is not an object")
    shards = value.get("pieces")
    _expect(isinstance(shards, list), f"{name}.pieces is not a list")
    return StoredTensor(
        dtype=_text(value.get("dtype"), f"{name}.dtype"),
        global_shape=_shape(value.get("global_shape"), f"{name}.global_shape"),
        shards=tuple(_shard_from_json(shard, f"{name}.pieces") for shard in shards),
    )


def _shard_from_json(value: Any, name: str) -> StoredShard:
    _expect(isinstance(value, dict), f"{name} holds something that is not an object")
    return StoredShard(
        file=_text(value.get("file"), f"{name}.file"),
        name=_text(value.get("name"), f"{name}.name"),
        box=Box(
            _shape(value.get("offset"), f"{name}.offset"),
            _shape(value.get("shape"), f"{name}.shape"),
        ),
        crc32=_text(value.get("crc32"), f"{name}.crc32"),
    )


def _file_from_json(value: Any, name: str) -> StoredFile:
    _expect(isinstance(value, dict), f"{name} is not an object")
    return StoredFile(
        size=_count(value.get("size"), f"{name}.size"),
        header_sha256=_text(value.get("header_sha256"), f"{name}.header_sha256"),
    )


def _table(content: Mapping[str, object], name: str, read: Any) -> dict[str, Any]:
    table = content.get(name)
    _expect(isinstance(table, dict), f"{name} is not an object")
    assert isinstance(table, dict)
    return {key: read(value, f"{name}.{key}") for key, value in table.items()}


def _shape(value: Any, name: str) -> tuple[int, ...]:
    _expect(isinstance(value, list), f"{name} is not a list")
    return tuple(_count(length, name) for length in value)


def _count(value: object, name: str) -> int:
    _expect(type(value) is int and 0 <= value < _LIMIT, f"{name} is {value!r}, not a count")
    assert isinstance(value, int)
    return value


def _text(value: object, name: str) -> str:
    _expect(isinstance(value, str), f"{name} is {value!r}, not a string")
    assert isinstance(value, str)
    return value


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
