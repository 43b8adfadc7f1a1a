"""What each rank saves and has written, as records that ranks exchange as JSON."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import cattrs

from .boxes import Box
from .manifest import StoredFile, StoredShard

Record = TypeVar("Record")
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


@attrs.frozen
class TensorHeader:
    """What all ranks must say alike of a tensor."""

    dtype: str  #: By its safetensors name.
    global_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.global_shape)}"


@attrs.frozen
class RankPlan:
    """What one rank saves."""

    tensors: dict[str, TensorHeader]
    boxes: dict[str, list[Box]]  #: Key -> the regions of the tensor that this rank writes.
    values: dict[str, str]  #: Key -> SHA-256 of the value's canonical JSON.
    nbytes: int


@attrs.frozen
class RankFile:
    """The file that one rank has written."""

    name: str
    file: StoredFile
    shards: dict[str, list[StoredShard]]


def to_json(record: Any) -> Any:
    """Return a record as a JSON value."""
    return _CONVERTER.unstructure(record)


def from_json(kind: type[Record], value: Any) -> Record:
    """Return the record of a JSON value."""
    return _CONVERTER.structure(value, kind)
