"""The bytes of all live storages, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks the bytes of all live storages that existed before or that an operation returned.

    Storages are tracked by weak references. Temporary memory inside an operation is not seen.

    torch's ``MemTracker`` does not support modules that are called more than once per step, as with
    micro-batches.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0
        for tensor in there:
            self._see(tensor)

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
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
