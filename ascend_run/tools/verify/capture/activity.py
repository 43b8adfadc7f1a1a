"""What one rank did in a training step and around it, to tell a plugin that acts from one that does
nothing: the same step without the plugin is the comparison."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ascend_run.ops.collective_releases import count_after_releases
from ascend_run.testing.conformance.snapshot import settings
from ascend_run.testing.effects import Collectives

_PASSIVE: Final = ("_unsafe_view", "clone", "empty", "new_empty", "resize_")
"""Operations besides views that change no number, or how their names start."""
_QUIET_COLLECTIVES: Final = ("barrier", "monitored_barrier_")
"""They exchange no data."""
_NO_SETTINGS: Final = ("modes", "hooks", "_global_", "is_initialized")
"""Words in names of process state that hooks change even if they do nothing."""


@attrs.define(kw_only=True)
class Activity:
    """What one rank did. Serializable as JSON."""

    operations: dict[str, int] = attrs.field(factory=dict)
    """Operation of torch's dispatcher -> calls in one step, except collectives."""
    passive: list[str] = attrs.field(factory=list)
    """Those of them that change no number: views, allocations, and operations that only read."""
    collectives: dict[str, list[int]] = attrs.field(factory=dict)
    """Operation of ``torch.ops.c10d`` -> calls, bytes of this rank's input tensors in that step."""
    copies: list[int] = attrs.field(factory=lambda: [0, 0])
    """Tensors and bytes that were copied without another change."""
    saved_bytes: int = 0
    """Bytes that the first forward of the step left allocated when its backward started."""
    settings: dict[str, str] = attrs.field(factory=dict)
    """Settings of torch during the run."""
    batch: dict[str, str] = attrs.field(factory=dict)
    """Field -> digest of the step's micro-batches."""
    metrics: dict[str, list[float]] = attrs.field(factory=dict)
    """Plugin metric -> its value after each step."""
    files: dict[str, int] = attrs.field(factory=dict)
    """File in the run folder -> its size. Checkpoints are left out."""
    saving: dict[str, list[int]] = attrs.field(factory=dict)
    """As ``collectives``, while a checkpoint is saved; empty if none is."""
    checkpoint: list[str] = attrs.field(factory=list)
    """Keys of the tensors in that checkpoint."""
    growing: list[str] = attrs.field(factory=list)
    """Those of plugins' own entries that changed between steps."""


class Observer:
    """Sees every operation of a block for ``effects.count_both``."""

    def __init__(self) -> None:
        self.passive: set[str] = set()
        """Names of operations that change no number."""
        self.copies = [0, 0]
        self.saved_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._has_begun_backward = self._has_communicated = False

    def see(self, function: Any, arguments: Sequence[Any], result: Any) -> None:
        name = function._opname
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if function.is_view or name.startswith(_PASSIVE) or not _writes(function, tensors):
            self.passive.add(name)
        elif _only_copies(name, arguments, tensors):
            self.copies[0] += 1
            self.copies[1] += tensors[0].nbytes
        if self._has_begun_backward:
            return
        if torch._C._current_graph_task_id() != -1:
            self._has_begun_backward = True
            self.saved_bytes = self._left_allocated()
            self._storages.clear()
            return
        self._has_communicated |= function.namespace == "c10d"
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _left_allocated(self) -> int:
        gc.collect()  # cycles would keep tensors that nothing needs
        if self._has_communicated:
            return count_after_releases(self._allocated)
        return self._allocated()

    def _allocated(self) -> int:
        return sum(
            nbytes for reference, nbytes in self._storages.values() if not reference.expired()
        )


def traffic(seen: Collectives) -> dict[str, list[int]]:
    """Return ``Activity.collectives``."""
    return {
        name: [count, seen.sent_bytes[name]]
        for name, count in seen.calls.items()
        if name not in _QUIET_COLLECTIVES
    }


def torch_settings() -> dict[str, str]:
    """Return the settings of torch that choose how operations compute."""
    return {
        name: str(value)
        for name, value in settings().items()
        if name.startswith("torch") and not any(word in name for word in _NO_SETTINGS)
    }


def _writes(function: Any, tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) or function._schema.is_mutable


def _only_copies(name: str, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    if name not in ("copy_", "_to_copy") or not tensors:
        return False
    source = arguments[1 if name == "copy_" else 0]
    return isinstance(source, Tensor) and source.dtype == tensors[0].dtype
