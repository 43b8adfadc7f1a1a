"""The storages that operators read and write in one step, and how many bytes of what are allocated.

A storage is known from the first operator on it until it is freed, which a weak reference tells.
What it holds is known later than its allocation: a gradient is one when backward has ended, an
activation when forward has. So allocations and frees are noted, and counted when the step has
ended.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_run.ops.collective_releases import count_after_releases
from ascend_run.plugin_api import ModelBundle, RunPhase

BETWEEN: Final = "between"
"""What is in no phase: gradients are set to zero, pipeline stages exchange activations."""


class Category(enum.StrEnum):
    """What a storage holds."""

    WEIGHTS = "weights"  #: Parameters of the models.
    GRADIENTS = "gradients"  #: Of parameters and master weights, and their buffers.
    OPTIMIZER = "optimizer"  #: States and master weights.
    ACTIVATIONS = "activations"  #: Left behind by a forward, and freed within the step.
    OTHER = "other"  #: Temporary tensors, buffers, tables.


class _Block:
    """A storage."""

    __slots__ = ("nbytes", "outlives_forward", "owner", "reference")

    def __init__(self) -> None:
        self.nbytes = 0
        self.owner: Category | None = None
        self.outlives_forward = False
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class _Change(NamedTuple):
    """A number of bytes that were allocated or, if negative, freed."""

    seconds: float
    phase: str
    nbytes: int = 0
    block: _Block | None = None  #: None at the border of a phase.
    reserved: int | None = None


class Recording(TorchDispatchMode):
    """Record one step, whose phases run within ``within``.

    Args:
        step: Its number, from 1.
        device: The storages of other devices are left out.
    """

    def __init__(self, step: int, models: Sequence[ModelBundle], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._models, self._device = step, models, device
        self._started = time.perf_counter()
        self._paused: float | None = None
        self._phase = BETWEEN
        self._live: dict[int, _Block] = {}
        self._seen: set[_Block] = set()
        self._changes: list[_Change] = []
        self._find_owners()
        self._add_border()

    @contextmanager
    def within(self, phase: RunPhase) -> Iterator[None]:
        """Record a phase of the step."""
        self._measure_again()
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
                for block in self._seen & {*self._live.values()}:
                    block.outlives_forward = True
            self._seen.clear()
            self._measure_again()
            self._find_owners()
            self._add_border()
            self._phase = BETWEEN

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device == self._device:
                self._seen.add(self._block_of(value))
        return result

    def end(self, min_bytes: int, *, failed: bool = False) -> list[dict[str, Any]]:
        """Stop, and return the samples of the step, each with the allocated bytes by category.

        Args:
            min_bytes: Between the borders of phases, changes by less are left out.
            failed: Whether the step was left by an exception: its activations are still there.
        """
        self._add_border()
        lasting = set() if failed else {*self._live.values()}
        for key in [*self._live]:
            self._live.pop(key).reference = None
        allocated = dict.fromkeys(Category, 0)
        samples: list[dict[str, Any]] = []
        before = dict(allocated)
        for change in self._changes:
            if change.block is not None:
                allocated[_category(change.block, lasting)] += change.nbytes
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

    def _block_of(self, tensor: Tensor) -> _Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._live.get(key)
        if block is None:
            block = self._live[key] = _Block()
            block.reference = weakref.ref(storage, partial(self._free, key))
        self._resize(block, storage.nbytes())
        return block

    def _free(self, key: int, reference: object) -> None:
        if (block := self._live.pop(key, None)) is not None:
            self._resize(block, 0)
            block.reference = None

    def _resize(self, block: _Block, nbytes: int) -> None:
        if nbytes != block.nbytes:
            self._add(nbytes - block.nbytes, block)
            block.nbytes = nbytes

    def _wait_for_releases(self) -> None:
        """Wait until no other thread holds on to what this one has released; in no time."""
        if not (self._device.type == "cpu" and torch.distributed.is_initialized()):
            return
        self._paused = time.perf_counter()
        count_after_releases(lambda: len(self._live))
        self._started += time.perf_counter() - self._paused
        self._paused = None

    def _seconds(self) -> float:
        return (self._paused or time.perf_counter()) - self._started

    def _measure_again(self) -> None:
        """Note storages that were emptied or filled by no operator."""
        for block in [*self._live.values()]:
            storage = None if block.reference is None else block.reference()
            if storage is not None:
                self._resize(block, storage.nbytes())

    def _find_owners(self) -> None:
        for category, tensor in _owned(self._models):
            if tensor.device == self._device:
                block = self._block_of(tensor)
                block.owner = block.owner or category

    def _add(self, nbytes: int, block: _Block) -> None:
        self._changes.append(_Change(self._seconds(), self._phase, nbytes, block))

    def _add_border(self) -> None:
        reserved = None
        if self._device.type != "cpu":
            reserved = torch.get_device_module(self._device).memory_reserved()
        self._changes.append(_Change(self._seconds(), self._phase, reserved=reserved))


def _category(block: _Block, lasting: set[_Block]) -> Category:
    if block.owner is not None:
        return block.owner
    is_activation = block.outlives_forward and block not in lasting
    return Category.ACTIVATIONS if is_activation else Category.OTHER


def _owned(models: Sequence[ModelBundle]) -> Iterator[tuple[Category, Tensor]]:
    """Yield what the models and their optimizers hold; if they share a storage, it is the first."""
    updated: list[Tensor] = []
    states: list[Tensor] = []
    for model in models:
        for part in getattr(model.optimizer, "chained_optimizers", ()):
            inner = part.optimizer
            updated += [tensor for group in inner.param_groups for tensor in group["params"]]
            states += tree_leaves([*inner.state.values()])
    weights = [
        weight for model in models for chunk in model.chunks for weight in chunk.parameters()
    ]
    for weight in weights:
        yield Category.WEIGHTS, weight
    for tensor in (*weights, *updated):
        for gradient in (tensor.grad, getattr(tensor, "main_grad", None)):
            if gradient is not None:
                yield Category.GRADIENTS, gradient
    for tensor in (*updated, *states):
        if isinstance(tensor, Tensor):
            yield Category.OPTIMIZER, tensor
