"""Write a file of ``torch.save`` tensor by tensor.

The file is first written without the bytes of its tensors; each tensor then goes to its place in
it. So one tensor at a time is in memory, in any number of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .megatron_names import flat
from .safe_pickle import load_file


class PickledFile:
    """One file whose tensors are written one after the other.

    Args:
        path: Must not exist.
        tensors: Name -> tensor on the device ``meta``.
        arrange: Makes the object to save from such tensors; must be a dict, perhaps nested.

    Raises:
        OSError: The file cannot be written, or the disk is full.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        arrange: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    ) -> None:
        self.path = path
        self._headers = dict(tensors)
        mode = FakeTensorMode()
        with mode:
            empty = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        saved = arrange(empty)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(saved, path)
        with mode:
            loaded = flat(load_file(path, mmap=False))
        names = {id(tensor): name for name, tensor in empty.items()}
        self._offsets: dict[str, int] = {}
        for at, tensor in flat(saved).items():
            offset = loaded[at].untyped_storage()._checkpoint_offset
            assert offset is not None, f"torch.load gives no offset of {at}"
            self._offsets[names[id(tensor)]] = offset
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one contiguous tensor."""
        expected = self._headers.pop(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
        data = tensor.detach().view(-1).view(torch.uint8).numpy().data
        with self.path.open("rb+", buffering=0) as file:
            file.seek(self._offsets[name])
            done = 0
            while done < len(data):
                done += file.write(data[done:])

    def close(self) -> None:
        """Check that every tensor has been written."""
        assert not self._headers, f"{self.path.name}: {sorted(self._headers)} were not written"
