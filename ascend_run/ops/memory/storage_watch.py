"""The storages that operators read and write.

A storage is followed from the first operator on it until a weak reference shows that it was freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WatchedStorage:
    """A storage that is followed until it is freed."""

    __slots__ = ("nbytes", "reference")

    def __init__(self) -> None:
        self.nbytes = 0
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class StorageWatch(TorchDispatchMode):
    """Follow the storages of a device; new ones are found while it is entered.

    Subclasses note what they need in ``resized``.

    Args:
        device: The storages of other devices are left out.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live: dict[int, WatchedStorage] = {}

    def resized(self, storage: WatchedStorage, difference: int) -> None:
        """Note that a storage has been found, resized or freed: ``storage.nbytes`` is its new size.

        Args:
            difference: To its former size. Unit: bytes.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device == self.device:
                self.watched(value)
        return result

    def watched(self, tensor: Tensor) -> WatchedStorage:
        """Return the storage of a tensor; if it is new, follow it from now on."""
        found = tensor.untyped_storage()
        key = found._cdata
        storage = self.live.get(key)
        if storage is None:
            storage = self.live[key] = WatchedStorage()
            storage.reference = weakref.ref(found, partial(self._free, key))
        self._resize(storage, found.nbytes())
        return storage

    def measure_again(self) -> None:
        """Note storages that were emptied or filled by no operator."""
        for storage in [*self.live.values()]:
            found = None if storage.reference is None else storage.reference()
            if found is not None:
                self._resize(storage, found.nbytes())

    def release(self) -> set[WatchedStorage]:
        """Follow no storage any more; return those that are not freed."""
        released = {*self.live.values()}
        for key in [*self.live]:
            self.live.pop(key).reference = None
        return released

    def _free(self, key: int, reference: object) -> None:
        if (storage := self.live.pop(key, None)) is not None:
            self._resize(storage, 0)
            storage.reference = None

    def _resize(self, storage: WatchedStorage, nbytes: int) -> None:
        difference = nbytes - storage.nbytes
        if difference:
            storage.nbytes = nbytes
            self.resized(storage, difference)
