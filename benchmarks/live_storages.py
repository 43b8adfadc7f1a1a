"""The bytes of all live storages in memory, and their peak."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks the bytes of all live storages that existed before or that an operation returned.

    Storages are tracked by weak references. Temporary memory inside an operation is not seen.
    Memory-mapped files are not counted.

    Where autograd itself adds two gradients of a tensor, it does so in place if it alone holds the
    first, but never below a dispatch mode. Such a sum is in place here, too, if the first gradient
    is gone when the next operation begins.

    torch's ``MemTracker`` does not support modules that are called more than once per step, as with
    micro-batches.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0
        self._sum: tuple[int, int] | None = None
        """The first gradient of a sum of autograd's, by its storage, and what was live with both
        and the sum."""
        in_file = mapped_files()
        for tensor in there:
            self._see(tensor, in_file=in_file(tensor))

    def __enter__(self) -> LiveStorages:
        inherited = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = inherited(storage, size)
            if storage._cdata in self._sizes:
                self.live += size - self._sizes[storage._cdata]
                self._sizes[storage._cdata] = size
                self.peak = max(self.peak, self.live)
            return result

        torch.UntypedStorage.resize_ = resize  # no operation that is dispatched
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._settle()
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._settle()
        result = function(*args, **(kwargs or {}))
        before = self.peak
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, in_file=function is torch.ops.aten.from_file.default)
        if function is torch.ops.aten.add.Tensor and _is_called_by_autograd():
            self._sum = args[0].untyped_storage()._cdata, self.live
            self.peak = before
        return result

    def _settle(self) -> None:
        """Count the last sum of autograd's beside its first gradient, if that is still there."""
        if self._sum is not None and self._sum[0] in self._sizes:
            self.peak = max(self.peak, self._sum[1])
        self._sum = None

    def _see(self, tensor: Tensor, *, in_file: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0 if in_file else storage.nbytes()
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def mapped_files() -> Callable[[Tensor], bool]:
    """Return whether a tensor that exists now is in a memory-mapped file without a name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("(deleted)"):
            start, end = re.split("[- ]", line)[:2]
            found.append(range(int(start, 16), int(end, 16)))
    return lambda tensor: any(tensor.data_ptr() in one for one in found)


def _is_called_by_autograd() -> bool:
    """Return whether the operation that is dispatched is the engine's own, not one in Python."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("_fn", "inner"):  # torch's, around a mode
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
