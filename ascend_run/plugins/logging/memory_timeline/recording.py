"""The storages that operators read and write in one step, and how many bytes of what are allocated.

What a storage holds is known later than its allocation: a gradient is one when backward has ended,
an activation when forward has. So allocations and frees are noted, and counted when the step has
ended.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ascend_run.ops.collective_releases import count_after_releases
from ascend_run.ops.linear.stored_weight import held_tensors
from ascend_run.ops.memory.storage_watch import StorageWatch, WatchedStorage
from ascend_run.ops.optimizer_states import torch_optimizers
from ascend_run.plugin_api import ModelBundle, RunPhase

BETWEEN: Final = "between"
"""What is in no phase: gradients are set to zero, pipeline stages exchange activations."""


class Category(enum.StrEnum):
    """What a storage holds."""

    WEIGHTS = "weights"  #: Parameters of the models.
    GRADIENTS = "gradients"  #: Of parameters and master weights, and the buffers they are in.
    OPTIMIZER = "optimizer"  #: States and master weights.
    BUFFERS = "buffers"  #: Of modules and, without weights and gradients, of data parallelism.
    ACTIVATIONS = "activations"  #: Left behind by a forward, and freed within the step.
    OTHER = "other"  #: Temporary tensors and tables.


class _Change(NamedTuple):
    """A number of bytes that were allocated or, if negative, freed."""

    seconds: float
    phase: str
    nbytes: int = 0
    storage: WatchedStorage | None = None  #: None at the border of a phase.
    reserved: int | None = None


class Recording(StorageWatch):
    """Record one step, whose phases run within ``within``.

    Args:
        step: Its number, from 1.
        device: The storages of other devices are left out.
    """

    def __init__(self, step: int, models: Sequence[ModelBundle], device: torch.device) -> None:
        super().__init__(device)
        self._step, self._models = step, models
        self._started = time.perf_counter()
        self._paused: float | None = None
        self._phase = BETWEEN
        self._owners: dict[WatchedStorage, Category] = {}
        self._seen: set[WatchedStorage] = set()
        self._outlives_forward: set[WatchedStorage] = set()
        self._changes: list[_Change] = []
        self._find_owners()
        self._add_border()

    @contextmanager
    def within(self, phase: RunPhase) -> Iterator[None]:
        """Record a phase of the step."""
        self.measure_again()
        self._add_border()
        self._phase = phase.value
        self._seen.clear()
        self._add_border()
        try:
            with self:
                yield
        finally:
            if phase is RunPhase.FORWARD:
                self._wait_for_releases()
                self._outlives_forward |= self._seen & {*self.live.values()}
            self._seen.clear()
            self.measure_again()
            self._find_owners()
            self._add_border()
            self._phase = BETWEEN

    def watched(self, tensor: Tensor) -> WatchedStorage:
        storage = super().watched(tensor)
        self._seen.add(storage)
        return storage

    def resized(self, storage: WatchedStorage, difference: int) -> None:
        self._changes.append(_Change(self._seconds(), self._phase, difference, storage))

    def end(self, min_bytes: int, *, failed: bool = False) -> list[dict[str, Any]]:
        """Stop, and return the samples of the step, each with the allocated bytes by category.

        Args:
            min_bytes: Between the borders of phases, changes by less are left out.
            failed: Whether the step was left by an exception: its activations are still there.
        """
        self._add_border()
        live = self.release()
        lasting = set() if failed else live
        allocated = dict.fromkeys(Category, 0)
        samples: list[dict[str, Any]] = []
        before = dict(allocated)
        for change in self._changes:
            if change.storage is not None:
                allocated[self._category(change.storage, lasting)] += change.nbytes
                if not samples or all(abs(allocated[x] - before[x]) < min_bytes for x in Category):
                    continue
            before = dict(allocated)
            samples.append(self._sample(change, allocated))
        return samples

    def _sample(self, change: _Change, allocated: Mapping[Category, int]) -> dict[str, Any]:
        sample: dict[str, Any] = {
            "step": self._step,
            "seconds": round(change.seconds, 6),
            "phase": change.phase,
            "values": {category.value: nbytes for category, nbytes in allocated.items()},
        }
        return sample if change.reserved is None else sample | {"reserved": change.reserved}

    def _category(self, storage: WatchedStorage, lasting: set[WatchedStorage]) -> Category:
        if (owner := self._owners.get(storage)) is not None:
            return owner
        is_activation = storage in self._outlives_forward and storage not in lasting
        return Category.ACTIVATIONS if is_activation else Category.OTHER

    def _wait_for_releases(self) -> None:
        """Wait until no other thread holds on to what this one has released; in no time."""
        if not (self.device.type == "cpu" and torch.distributed.is_initialized()):
            return
        self._paused = time.perf_counter()
        count_after_releases(lambda: len(self.live))
        self._started += time.perf_counter() - self._paused
        self._paused = None

    def _seconds(self) -> float:
        return (self._paused or time.perf_counter()) - self._started

    def _find_owners(self) -> None:
        for category, tensor in _owned(self._models):
            if tensor.device == self.device:
                self._owners.setdefault(self.watched(tensor), category)

    def _add_border(self) -> None:
        reserved = None
        if self.device.type != "cpu":
            reserved = torch.get_device_module(self.device).memory_reserved()
        self._changes.append(_Change(self._seconds(), self._phase, reserved=reserved))


def _owned(models: Sequence[ModelBundle]) -> Iterator[tuple[Category, Tensor]]:
    """Yield what the models and their optimizers hold; if they share a storage, it is the first."""
    updated: list[Tensor] = []
    states: list[Tensor] = []
    for model in models:
        for optimizer in torch_optimizers(model.optimizer):
            updated += [tensor for group in optimizer.param_groups for tensor in group["params"]]
            states += tree_leaves([*optimizer.state.values()])
    chunks = [chunk for model in models for chunk in model.chunks]
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    for weight in weights:
        for held in held_tensors(weight):
            yield Category.WEIGHTS, held
    for tensor in (*weights, *updated):
        for gradient in (tensor.grad, getattr(tensor, "main_grad", None)):
            if gradient is not None:
                yield Category.GRADIENTS, gradient
    for tensor in (*updated, *states):
        if isinstance(tensor, Tensor):
            yield Category.OPTIMIZER, tensor
    for chunk in chunks:
        for buffer in (*_of_modules(chunk), *_of_data_parallelism(chunk)):
            yield Category.BUFFERS, buffer


def _of_modules(chunk: nn.Module) -> Iterator[Tensor]:
    for module in chunk.modules():
        # Not by buffers(), a name that Megatron's DistributedDataParallel redefines.
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _of_data_parallelism(chunk: nn.Module) -> Iterator[Tensor]:
    """Yield what Megatron's DistributedDataParallel allocates, if that wraps the chunk."""
    for name in ("buffers", "expert_parallel_buffers"):
        buffers = getattr(chunk, name, None)
        for buffer in buffers if isinstance(buffers, list) else ():
            yield from (x for x in (buffer.param_data, buffer.grad_data) if x is not None)
