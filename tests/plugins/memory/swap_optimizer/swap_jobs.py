"""Jobs for gloo ranks: steps, what they leave on the device, and late copies."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import StorageError
from ascend_run.plugins.platforms.cpu.device import CpuDevice
from tests.support.small_runs import Training, Values, training
from tests.support.stepping_jobs import Readings, live_tensors, storage_bytes, take_steps

_NOISE: Final = 255
"""What memory holds before a copy to it is complete."""


@attrs.frozen
class Steps:
    """What a rank had after each step."""

    readings: Readings
    digests: list[str]
    """Of every tensor of the checkpoint, master weights and moments included."""
    state_bytes: int
    """Bytes of states and master weights that are not in a file, between steps."""
    live_bytes: int
    """Bytes of all tensors of the job that are not in a file, between steps."""
    file_bytes: int
    """Bytes of the files between steps."""
    most_bytes: int
    """Bytes that a step adds to the tensors that are not in a file, when the optimizer steps."""


def stepwise(
    values: Values,
    enable: Sequence[str],
    steps: int,
    overflowing: Collection[int] = (),
    every: int = 1,
) -> Steps:
    """Take steps, some of which overflow; look at the state every so many steps."""
    from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters

    before = live_tensors()
    old = {t.untyped_storage().data_ptr() for t in before}
    with training(values, enable) as run:
        readings, digests = take_steps(run, steps, overflowing, every)
        most = _added_by_a_step(run)
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        items = [*stepped_parameters(run.bundle.optimizer)]
        held = [tensor for item in items for tensor in item.inner.state[item.stepped].values()]
        held += [item.stepped for item in items if item.stepped.dtype != item.parameter.dtype]
        of_files = _files()
        new = [t for t in live_tensors() if t.untyped_storage().data_ptr() not in old]
        return Steps(
            readings,
            digests,
            state_bytes=storage_bytes([t for t in held if not of_files(t)]),
            live_bytes=storage_bytes([t for t in new if not of_files(t)]),
            file_bytes=storage_bytes([t for t in new if of_files(t)]),
            most_bytes=most,
        )


def late(values: Values, enable: Sequence[str], steps: int) -> list[str]:
    """Take steps on a device whose copies end as late as they may; return the digests."""
    inner, CpuDevice.host_copier = CpuDevice.host_copier, lambda self: LateCopier()  # type: ignore[assignment, method-assign, return-value]
    try:
        with training(values, enable) as run:
            return take_steps(run, steps, (), 1)[1]
    finally:
        CpuDevice.host_copier = inner  # type: ignore[method-assign]


def anonymous_bytes(values: Values, enable: Sequence[str]) -> int:
    """Return what a model and its states add to the memory of the process that is in no file."""
    import gc

    before = _anonymous()
    with training(values, enable) as run:
        run.step()
        run.bundle.optimizer.zero_grad()  # type: ignore[union-attr]
        gc.collect()
        return _anonymous() - before


def resident_file_bytes(values: Values, enable: Sequence[str]) -> list[int]:
    """Return the bytes of the files that are in memory: after building, loading, and a step."""
    found = []
    with training(values, enable) as run:
        found.append(_resident())
        run.bundle.optimizer.reload_model_params()  # type: ignore[union-attr]
        found.append(_resident())
        run.step()
        found.append(_resident())
    return found


def without_room(values: Values, enable: Sequence[str]) -> str:
    """Return the error of a run that finds a full disk."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reserve, os.posix_fallocate = os.posix_fallocate, full
    try:
        with training(values, enable):
            return ""
    except StorageError as error:
        return str(error)
    finally:
        os.posix_fallocate = reserve


class LateCopier:
    """contracts.HostCopier whose copies run when they are waited for; a tensor holds noise until
    then, and again once it may be freed."""

    def __init__(self) -> None:
        self._leaving: list[tuple[Tensor, Tensor]] = []
        self._coming: list[tuple[Tensor, Tensor]] = []

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        host = torch.empty_like(tensor) if out is None else out
        self._leaving.append((tensor.detach(), _noise(host)))
        return host

    def wait_host(self) -> None:
        for source, host in self._leaving:
            host.copy_(source)
            _noise(source)
        self._leaving.clear()

    def to_device(self, host: Tensor, out: Tensor) -> None:
        self.wait_host()
        self._coming.append((host, _noise(out)))

    def wait_device(self) -> None:
        for host, out in self._coming:
            out.copy_(host)
        self._coming.clear()


def _noise(tensor: Tensor) -> Tensor:
    tensor.view(-1).view(torch.uint8).fill_(_NOISE)
    return tensor


def _added_by_a_step(run: Training) -> int:
    """Take one more step, and return what exists in it beside what did when its update began."""
    sizes: list[int] = []
    for part in run.bundle.optimizer.chained_optimizers:  # type: ignore[union-attr]
        _watch(part, sizes)
    run.step()
    return max(sizes)


def _watch(part: Any, sizes: list[int]) -> None:
    of_files = _files()

    def size() -> int:
        return storage_bytes([t for t in live_tensors() if not of_files(t)])

    update, step = part.update, part.optimizer.step
    before: list[int] = []

    def watched_update() -> None:
        before[:] = [size()]
        update()

    def watched_step() -> None:
        step()
        sizes.append(size() - before[0])

    part.update, part.optimizer.step = watched_update, watched_step


def _files() -> Callable[[Tensor], bool]:
    """Return whether a tensor is in a mapped file without a name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("(deleted)"):
            start, end = re.split("[- ]", line)[:2]
            found.append(range(int(start, 16), int(end, 16)))
    return lambda tensor: any(tensor.data_ptr() in one for one in found)


def _resident() -> int:
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    sizes = [re.search(r"^Rss: +(\d+) kB", one, re.M) for one in maps if "(deleted)\n" in one]
    assert sizes  # of files without a name
    return sum(1024 * int(size[1]) for size in sizes if size is not None)


def _anonymous() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what is freed goes back to the system
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
