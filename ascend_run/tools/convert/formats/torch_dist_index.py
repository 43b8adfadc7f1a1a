"""The index of a ``torch_dist`` checkpoint: which bytes of which file hold which box of a tensor.

It is a pickle, ``.metadata``. Its classes become inert records, and any other name is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import attrs
import torch

from ascend_run.core.checkpoint.boxes import Box
from ascend_run.plugin_api.errors import CheckpointError

from .safe_pickle import Inert

INDEX: Final = ".metadata"
_DCP: Final = "torch.distributed.checkpoint"
_RECORDS: Final = frozenset(
    {
        f"{_DCP}.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        f"{_DCP}.planner.{name}"  # Megatron keeps the plans of the save
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    }
    | {
        f"{_DCP}.filesystem._StorageInfo",
        "pathlib.Path",
        "pathlib.PosixPath",
        "torch.serialization._get_layout",
    }
)
_PLAIN: Final[Mapping[str, Any]] = {
    "torch.Size": torch.Size,
    "builtins.set": set,
    "collections.OrderedDict": dict,
}


@attrs.frozen
class StoredChunk:
    """A box of a tensor, saved by ``torch.save`` at a position of a file."""

    box: Box
    file: str
    offset: int
    length: int


@attrs.frozen
class IndexedTensor:
    """One tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


def read_index(folder: Path) -> dict[str, IndexedTensor]:
    """Read the index of a checkpoint.

    Raises:
        CheckpointError: It is missing, malformed, or names a class that it should not.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _Unpickler(file, str(path)).load()
        return _tensors(index, folder)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except CheckpointError:
        raise
    except Exception as problem:  # a malformed pickle raises anything
        raise CheckpointError(
            f"{path} is truncated, corrupt, or no index of torch.distributed.checkpoint: {problem}"
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file)
        self.name = name

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _RECORDS:
            return Inert
        if full in _PLAIN:
            return _PLAIN[full]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"{self.name} is refused: it asks for {full}, no part of an index")


def _tensors(index: Any, folder: Path) -> dict[str, IndexedTensor]:
    stored: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for key, info in index.fields["storage_data"].items():
        if (offset := key.fields.get("offset")) is not None:
            stored[key.fields["fqn"], tuple(offset)] = info.fields
    tensors: dict[str, IndexedTensor] = {}
    for name, record in index.fields["state_dict_metadata"].items():
        if "chunks" not in record.fields:
            continue
        chunks = []
        for chunk in record.fields["chunks"]:
            box = Box(tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"]))
            if (info := stored.get((name, box.offset))) is None:
                raise CheckpointError(f"{folder / INDEX}: no bytes of {name} at {box.offset}")
            if Path(info["relative_path"]).name != info["relative_path"]:
                raise CheckpointError(f"{folder / INDEX}: {info['relative_path']!r} is no file")
            chunks.append(
                StoredChunk(box, info["relative_path"], int(info["offset"]), int(info["length"]))
            )
        dtype = record.fields["properties"].state[0]
        sizes = (*record.fields["size"], *(n for one in chunks for n in one.box.shape))
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in sizes):
            raise CheckpointError(f"{folder / INDEX}: {name} has no dtype or no shape")
        tensors[name] = IndexedTensor(tuple(record.fields["size"]), dtype, tuple(chunks))
    return tensors
