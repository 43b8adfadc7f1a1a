"""Writing tensors as they come into safetensors files of bounded size, holding one at a time.

The format puts its header first, with every tensor's place in it; room for the header is left at
the head of each file and filled in, padded with the blanks that the format allows, when the file is
full. Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from .stored_tensors import INDEX_FILE, SINGLE_FILE

_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_ENTRY_BYTES: Final = 160
"""More than an entry of the header takes beside its name: dtype, shape and two offsets."""


class SafetensorsShards:
    """``model.safetensors``, or as many numbered files with their index as the size asks for.

    Args:
        folder: Exists; nothing in it is overwritten by more than these files.
        names: Every name that may be added, in any file (they bound the header).
        max_shard_bytes: A file is closed before it would grow beyond this; one tensor that is
            larger gets a file of its own.
    """

    def __init__(self, folder: Path, names: Iterable[str], max_shard_bytes: int) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self.weight_map: dict[str, int] = {}
        """Tensor name -> number of its file, from 0."""
        room = 64 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._header_bytes = -(-room // 8) * 8
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._position = 0
        self._total = 0
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from whatever device and with whatever strides."""
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
        """Give the files their final names, and write the index where there is more than one."""
        self._finish_file()
        if self._count == 1:
            self._path(0).rename(self.folder / SINGLE_FILE)
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
        """Close the file under way, whatever state it is in."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode()
        assert len(header) <= self._header_bytes, "the header outgrew its room"
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
