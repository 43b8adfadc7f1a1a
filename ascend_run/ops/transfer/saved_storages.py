"""Storages that autograd saves: which of them can leave the device, and where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


@attrs.define(eq=False, kw_only=True)
class Block:
    """One storage: its bytes on the host and, while needed, on the device."""

    nbytes: int
    source: StorageWeakRef
    """The storage that was saved."""
    device: Tensor | None
    """[n] uint8; None while offloaded."""
    host: Tensor | None = None
    """[n] uint8; None if it was not copied."""

    def still_held(self) -> Tensor | None:
        """Return the bytes that were saved, if something else holds them on the device."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.source.cdata)
        if storage is None or storage.nbytes() != self.nbytes:  # freed, or emptied
            return None
        return whole(storage)


@attrs.frozen(eq=False, kw_only=True)
class SavedView:
    """What autograd saves instead of a tensor: a storage and the tensor's view of it."""

    block: Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, whose storage is on the device."""
        device = self.block.device
        assert device is not None
        like = torch.empty(0, dtype=self.dtype, device=device.device)
        return like.set_(device.untyped_storage(), self.offset, self.size, self.stride)


def whole(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor, [n] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def can_leave(tensor: Tensor, device: torch.device, min_bytes: int) -> bool:
    """Return whether a saved tensor can be offloaded and is large enough.

    A leaf (a parameter, an input that a pipeline stage received) is held until its gradient is
    read, so offloading it frees nothing.
    """
    base = tensor if tensor._base is None else tensor._base
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device == device
        and not (base.is_leaf and base.requires_grad)
        and tensor.untyped_storage().nbytes() >= min_bytes
    )


def arguments_that_stay(args: Any, kwargs: Any) -> frozenset[int]:
    """Return the addresses of arguments that stay on the device in any case: those that need no
    gradient (rotary tables, masks), which all layers share, and those that are discarded."""
    return addresses(
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
        and (not leaf.requires_grad or getattr(leaf, "ascend_discarded", False))
    )


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the addresses of their storages."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
