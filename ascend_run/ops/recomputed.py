"""Recompute in backward what a forward would save, up to the last tensor that is needed.

During the forward autograd saves handles in place of tensors. When the gradient arrives, the
forward is repeated until it has saved the last tensor that a handle stands for: what follows that,
such as the matmul whose input was the last one, is not repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .saved_tensors import without_graph

Collect: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Context in which the repeated forward runs."""
RandomState: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes a context in which the random generators have an earlier state, and after it their own."""


class Completed(Exception):
    """The repeated forward has saved all that is needed."""


class _Handle:
    """What autograd saves instead of a tensor."""

    def __init__(self, forward: RecomputedForward, like: Tensor) -> None:
        self.forward = forward
        self.kind = like.shape, like.dtype
        self.tensor: Tensor | None = None


class RecomputedForward:
    """One forward, whose saved tensors are dropped until its backward.

    Integers, booleans, vectors and columns (probabilities of tokens) are saved as they are.

    Args:
        repeat: Repeats the forward within the context that it is given.
        stays: Tensors whose storages exist in any case, such as parameters: saved as they are.
    """

    def __init__(self, repeat: Callable[[Collect], object], stays: Iterable[Tensor]) -> None:
        self._repeat: Callable[[Collect], object] | None = repeat
        self._stays = {_storage(tensor) for tensor in stays}
        # Weak, since a handle is freed with the autograd node that saves it.
        self._handles: list[weakref.ref[_Handle] | None] = []

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def restore(self, *_: object) -> None:
        """Repeat the forward, once; further calls do nothing."""
        repeat, self._repeat = self._repeat, None
        if repeat is None:
            return
        missing = {at: handle for at, ref in enumerate(self._handles) if ref and (handle := ref())}
        if not missing:
            return
        packed = -1

        def pack(tensor: Tensor) -> Tensor:
            nonlocal packed
            packed += 1
            if handle := missing.pop(packed, None):
                if handle.kind != (tensor.shape, tensor.dtype):
                    raise RuntimeError(_OTHER)
                handle.tensor = tensor
                if not missing:
                    raise Completed
            return without_graph(tensor)

        try:
            repeat(lambda: saved_tensors_hooks(pack, lambda tensor: tensor))
        except Completed:
            return
        raise RuntimeError(_OTHER)

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        narrow = tensor.dim() < 2 or tensor.shape[-1] == 1
        if narrow or not tensor.is_floating_point() or _storage(tensor) in self._stays:
            self._handles.append(None)
            return without_graph(tensor)
        handle = _Handle(self, tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def _unpack(self, saved: Tensor | _Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.restore()
        assert saved.tensor is not None
        return saved.tensor


def repeat_forward(
    forward: Callable[..., object],
    random_state: RandomState,
    tensors: tuple[tuple[Tensor, bool], ...],
    collect: Collect,
) -> None:
    """Repeat a forward with detached inputs, each with whether it requires a gradient."""
    inputs = [x.detach().requires_grad_(requires) for x, requires in tensors]
    with torch.enable_grad(), random_state(), collect():
        forward(*inputs)
    raise RuntimeError(_OTHER)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_OTHER = (
    "a recomputed forward saved other tensors than the forward before; it must be deterministic, "
    "apart from the random generators"
)
