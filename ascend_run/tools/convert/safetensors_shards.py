"""Write tensors to safetensors files of bounded size, with one tensor in memory at a time.

A file starts with a header that has the offsets of all tensors. Space for it is reserved, and the
header is written when the file is complete, padded with spaces as the format allows. Format:
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from ascend_run.core.hugging_face.stored_tensors import INDEX_FILE, SINGLE_FILE

_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_METADATA: Final[Mapping[str, str]] = {"format": "pt"}
_ENTRY_BYTES: Final = 160
"""Upper bound of a header entry's size without its name: dtype, shape and two offsets."""


class SafetensorsShards:
    """Writes ``model.safetensors``, or numbered files with an index if one file is too large.

    Args:
        folder: An existing folder.
        names: All names that may be added; they bound the size of the header.
        max_shard_bytes: Maximum size of a file; a larger tensor gets a file of its own.
        single: Name of the file if there is one.
        metadata: Of each file.
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        max_shard_bytes: float,
        single: str = SINGLE_FILE,
        metadata: Mapping[str, str] = _METADATA,
    ) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self.single = single
        self.metadata = dict(metadata)
        self.weight_map: dict[str, int] = {}
        """Tensor name -> index of its file."""
        room = (
            64
            + len(json.dumps(self.metadata))
            + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        )
        self._header_bytes = -(-room // 8) * 8
        self._file: BinaryIO | None = None
        self._header: dict[str, object] = {}
        self._position = 0
        self._total = 0
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device and with any strides."""
        assert name not in self.weight_map, f"{name} is written twice"
        data = tensor.detach().cpu().contiguous()
        size = data.numel() * data.element_size()
        if self._file is not None and self._position + size > self.max_shard_bytes:
            self._finish_file()
        if self._file is None:
            self._file = self._path(self._count).open("xb")
            self._file.seek(8 + self._header_bytes)
        self._file.write(data.view(torch.uint8).numpy().data)
        self._header[name] = {
            "dtype": _DTYPE_NAMES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [self._position, self._position + size],
        }
        self.weight_map[name] = self._count
        self._position += size
        self._total += size

    def close(self) -> None:
        """Rename the files to their final names, and write the index if there are several."""
        self._finish_file()
        if self._count == 1:
            self._path(0).rename(self.folder / self.single)
            return
        final = [f"model-{n + 1:05}-of-{self._count:05}.safetensors" for n in range(self._count)]
        for number, name in enumerate(final):
            self._path(number).rename(self.folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: final[number] for name, number in self.weight_map.items()},
        }
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def abandon(self) -> None:
        """Close the current file without completing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": self.metadata, **self._header}).encode()
        assert len(header) <= self._header_bytes, "the header exceeds the reserved space"
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little"))
        self._file.write(header.ljust(self._header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, self._header, self._position = None, {}, 0
        self._count += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"
