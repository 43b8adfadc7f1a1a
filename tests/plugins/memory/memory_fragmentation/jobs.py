"""What a rank of the pool does for this suite."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from unittest import mock

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ascend_run.ops.memory.storage_watch import StorageWatch, WatchedStorage
from ascend_run.ops.optimizer_states import torch_optimizers
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from tests.plugins.platforms.npu.stand_in import npu_on_the_cpu
from tests.support.small_runs import Training, training

NAME = "memory-fragmentation"
PoolId: TypeAlias = tuple[int, int]
"""Of torch's allocator."""
DEFAULT: Final = (0, 0)


class Pool(StorageWatch):
    """A pool of a device without pools, which knows the storages that were made within it."""

    number: Final = (0, 1)

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.entered = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for value in _tensors(result):
            if value.device == self.device and value.untyped_storage()._cdata not in given:
                self.watched(value)
        return result

    def resized(self, storage: WatchedStorage, difference: int) -> None:
        """Do nothing: it counts no bytes."""

    @contextmanager
    def enter(self) -> Iterator[None]:
        self.entered += 1
        with self:
            yield

    def pools_of(self, tensors: Sequence[Tensor]) -> set[PoolId]:
        """Return the pools in which tensors are."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return {self.number if storage in self.live else DEFAULT for storage in storages}

    def reserved(self) -> Counter[PoolId]:
        """Return the bytes of this pool, all of which are allocated."""
        return Counter({self.number: sum(storage.nbytes for storage in self.live.values())})


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class Segments:
    """The segments of a device's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._index = torch.get_device_module(device), device.index

    def pools_of(self, tensors: Sequence[Tensor]) -> set[PoolId]:
        """Return the pools in whose segments tensors lie."""
        segments = self._found()
        return {
            segment["segment_pool_id"]
            for address in (t.untyped_storage().data_ptr() for t in tensors)
            for segment in segments
            if segment["address"] <= address < segment["address"] + segment["total_size"]
        }

    def reserved(self) -> Counter[PoolId]:
        """Return the bytes of each pool."""
        sizes = Counter[PoolId]()
        for segment in self._found():
            sizes[segment["segment_pool_id"]] += segment["total_size"]
        assert sizes.total() == self._module.memory_reserved(self._index)
        return sizes

    def _found(self) -> list[dict[str, Any]]:
        found = self._module.memory_snapshot()
        return [segment for segment in found if segment["device"] == self._index]


def lasting(run: Training) -> Iterator[Tensor]:
    for chunk in run.bundle.chunks:
        for weight in chunk.parameters():
            yield weight
            if (gradient := getattr(weight, "main_grad", None)) is not None:
                yield gradient
    for optimizer in torch_optimizers(run.bundle.optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]
        for states in optimizer.state.values():
            yield from (state for state in states.values() if isinstance(state, Tensor))


def in_the_pool(values: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many tensors last, how many of these are not in the pool after two steps, and how often
    the pool was entered."""
    pool = Pool()
    with (
        mock.patch.object(CpuDevice, "memory_pool", return_value=pool.enter),
        training(values, [NAME]) as run,
    ):
        run.step_with_events()
        run.step_with_events()
        stay = [tensor.untyped_storage()._cdata for tensor in lasting(run)]
    return len(stay), len({*stay} - pool.live.keys()), pool.entered


def on_the_npu(values: Mapping[str, Any]) -> tuple[int, int]:
    """How many pools of the device two steps create, and how often one is entered."""
    with npu_on_the_cpu() as seen, training({**values, "platform": "npu"}, [NAME]) as run:
        run.step_with_events()
        run.step_with_events()
    return seen.calls["MemPool"], seen.calls["use_mem_pool"]


@attrs.frozen
class Placed:
    """What two steps of a rank leave, and where: on the CPU in ``Pool``, or not."""

    digests: list[str]  #: Of each tensor that lasts.
    lasting_bytes: int
    pools: set[PoolId]  #: Of the tensors that last.
    pools_of_outputs: set[PoolId]  #: Of what a forward returns.
    reserved: list[Counter[PoolId]]  #: Bytes by pool, after each step.


def placed(values: Mapping[str, Any], enable: Sequence[str]) -> Placed:
    """Take two steps."""
    pool = Pool()
    with (
        mock.patch.object(CpuDevice, "memory_pool", return_value=pool.enter),
        training(values, enable) as run,
    ):
        device = run.context.device.torch_device
        memory = pool if device.type == "cpu" else Segments(device)
        outputs: set[PoolId] = set()
        reserved = []

        def note(module: object, inputs: object, output: Tensor) -> None:
            outputs.update(memory.pools_of([output]))

        run.bundle.chunks[0].register_forward_hook(note)
        for _ in range(2):
            run.step_with_events()
            reserved.append(memory.reserved())
        stay = [tensor.detach() for tensor in lasting(run) if tensor.device == device]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in stay}
        return Placed(
            [_digest(tensor) for tensor in stay],
            sum(storages.values()),
            memory.pools_of(stay),
            outputs,
            reserved,
        )


def _digest(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()
