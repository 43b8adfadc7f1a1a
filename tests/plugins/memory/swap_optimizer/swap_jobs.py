"""Jobs for gloo ranks: copies that are late, and what of the files is in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugins.platforms.cpu.device import CpuDevice
from tests.support.small_runs import Values, training
from tests.support.stepping_jobs import take_steps

_NOISE: Final = 255
"""What memory holds before a copy to it is complete."""


def late(values: Values, enable: Sequence[str], steps: int) -> list[str]:
    """Take steps on a device whose copies end as late as they may; return the digests."""
    inner, CpuDevice.host_copier = CpuDevice.host_copier, lambda self: LateCopier()  # type: ignore[assignment, method-assign, return-value]
    try:
        with training(values, enable) as run:
            return take_steps(run, steps, (), 1)[1]
    finally:
        CpuDevice.host_copier = inner  # type: ignore[method-assign]


def resident_file_bytes(values: Values, enable: Sequence[str], folder: str) -> list[int]:
    """Return the bytes of a folder's files that are in memory: after building, loading, and a
    step."""
    found = []
    with training(values, enable) as run:
        found.append(_resident(folder))
        run.bundle.optimizer.reload_model_params()  # type: ignore[union-attr]
        found.append(_resident(folder))
        run.step()
        found.append(_resident(folder))
    return found


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


def _resident(folder: str) -> int:
    """Bytes in memory of the files of a folder, which have no names; earlier jobs of this process
    may have mapped others."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    ours = [one for one in maps if f" {folder}/" in one.partition("\n")[0]]
    sizes = [re.search(r"^Rss: +(\d+) kB", one, re.M) for one in ours]
    assert sizes
    return sum(1024 * int(size[1]) for size in sizes if size is not None)
