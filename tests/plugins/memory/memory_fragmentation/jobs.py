"""What a rank of the pool does for this suite."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import attrs
import torch
from torch import Tensor

from ascend_run.ops.memory.storage_watch import StorageWatch, WatchedStorage
from ascend_run.ops.optimizer_states import torch_optimizers
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from tests.plugins.platforms.npu.stand_in import npu_on_the_cpu
from tests.support.small_runs import Training, training

NAME = "memory-fragmentation"
PoolId: TypeAlias = tuple[int, int]
"""Of torch's allocator; that of its default pool is (0, 0)."""


class Pool(StorageWatch):
    """A pool of a device, which knows the storages that were used within it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.entered = 0

    def resized(self, storage: WatchedStorage, difference: int) -> None:
        """Do nothing: it counts no bytes."""

    @contextmanager
    def enter(self) -> Iterator[None]:
        self.entered += 1
        with self:
            yield


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
    """What two steps of a rank leave, and where torch's allocator has it; on the CPU nowhere."""

    digests: list[str]  #: Of each tensor that lasts.
    lasting_bytes: int
    pools: set[PoolId]  #: Of the tensors that last.
    pools_of_outputs: set[PoolId]  #: Of what a forward returns.
    reserved: list[Counter[PoolId]]  #: Bytes by pool, after each step.
    reserved_bytes: int  #: In all, after both.


def placed(values: Mapping[str, Any], enable: Sequence[str]) -> Placed:
    """Take two steps."""
    with training(values, enable) as run:
        device = run.context.device.torch_device
        outputs: set[PoolId] = set()
        reserved = []

        def note(module: object, inputs: object, output: Tensor) -> None:
            outputs.update(_pools([output], device))

        run.bundle.chunks[0].register_forward_hook(note)
        for _ in range(2):
            run.step_with_events()
            reserved.append(Counter[PoolId]())
            for segment in _segments(device):
                reserved[-1][segment["segment_pool_id"]] += segment["total_size"]
        stay = [tensor.detach() for tensor in lasting(run) if tensor.device == device]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in stay}
        of_device = device.type != "cpu"
        return Placed(
            [_digest(tensor) for tensor in stay],
            sum(storages.values()),
            _pools(stay, device),
            outputs,
            reserved,
            torch.get_device_module(device).memory_reserved(device) if of_device else 0,
        )


def _segments(device: torch.device) -> list[dict[str, Any]]:
    if device.type == "cpu":
        return []
    found = torch.get_device_module(device).memory_snapshot()
    return [segment for segment in found if segment["device"] == device.index]


def _pools(tensors: Sequence[Tensor], device: torch.device) -> set[PoolId]:
    """Return the pools in whose segments tensors lie."""
    segments = _segments(device)
    return {
        segment["segment_pool_id"]
        for address in (t.untyped_storage().data_ptr() for t in tensors)
        for segment in segments
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    }


def _digest(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()
