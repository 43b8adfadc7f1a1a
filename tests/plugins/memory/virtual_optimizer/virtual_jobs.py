"""Jobs for ranks: the first step, memory of the host that few operators address, and what the
platform of the tests has on its device."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.memory.host_mapped import HostMapped
from ascend_run.ops.optimizer_states import torch_optimizers
from benchmarks.live_storages import mapped_files
from tests.support.small_runs import Training, Values, training
from tests.support.stepping_jobs import live_tensors, shards_of, storage_bytes


def placed(values: Values, enable: Sequence[str]) -> tuple[list[str], int]:
    """Take steps; return digests of the weights and states, and the bytes on the device. On the
    CPU these are in no file."""
    with training(values, enable) as run:
        device = run.context.device.torch_device
        for _ in range(3):
            run.step()
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        digests = [_digest(tensor.detach()) for tensor in _lasting(run)]
        if device.type == "cpu":
            of_files = mapped_files()
            return digests, storage_bytes([t for t in live_tensors() if not of_files(t)])
        gc.collect()
        return digests, torch.get_device_module(device).memory_allocated(device)


def _lasting(run: Training) -> Iterator[Tensor]:
    for chunk in run.bundle.chunks:
        yield from chunk.parameters()
    for optimizer in torch_optimizers(run.bundle.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from optimizer.state[parameter].values()


def _digest(tensor: Tensor) -> str:
    values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()


def before_a_step(values: Values, enable: Sequence[str]) -> int:
    """Create all states, as for a checkpoint; return the bytes that are then in no file."""
    with training(values, enable) as run:
        with shards_of(run):
            pass
        of_files = mapped_files()
        optimizers = torch_optimizers(run.bundle.optimizer)
        states = [s for one in optimizers for of_p in one.state.values() for s in of_p.values()]
        return storage_bytes([s for s in states if s.ndim and not of_files(s)])


def first_step(values: Values, enable: Sequence[str]) -> tuple[int, int]:
    """Return the most bytes of states that are not on the host whenever the optimizer has stepped
    in the first step, and their number of steps."""
    empty = HostMapped.empty
    on_host: set[int] = set()

    def noted(self: HostMapped, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = empty(self, shape, dtype)
        on_host.add(tensor.data_ptr())
        return tensor

    sizes: list[int] = []
    HostMapped.empty = noted  # type: ignore[method-assign]
    try:
        with training(values, enable) as run:
            for part in run.bundle.optimizer.chained_optimizers:  # type: ignore[union-attr]
                part.optimizer.step = _watched(part.optimizer, on_host, sizes)
            run.step()
    finally:
        HostMapped.empty = empty  # type: ignore[method-assign]
    return max(sizes), len(sizes)


def _watched(optimizer: Any, on_host: set[int], sizes: list[int]) -> Callable[[], None]:
    step = optimizer.step

    def watched() -> None:
        step()
        held = [t for states in optimizer.state.values() for t in states.values() if t.ndim]
        sizes.append(storage_bytes([t for t in held if t.data_ptr() not in on_host]))

    return watched


def with_few_operators(job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a job while memory of the host can only be read by a copy, after which it has noise until
    it is written again."""
    read, HostMapped.read = HostMapped.read, _taken  # type: ignore[method-assign]
    try:
        return job(*arguments)
    finally:
        HostMapped.read = read  # type: ignore[method-assign]


def _taken(memory: HostMapped, mapped: Tensor) -> Tensor:
    values = mapped.clone()
    mapped.view(-1).view(torch.uint8).fill_(255)
    return values
