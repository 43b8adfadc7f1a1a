"""The copies between a device and its host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from ascend_run.ops.transfer.swap_plan import Link
from ascend_run.plugin_api import Device

_SAMPLE: Final = 32 << 20
"""Bytes that are copied to measure the link."""
_TRIES: Final = 3
"""Copies in each direction, of which the fastest one counts."""


class CopyStreams:
    """The copies of a device, a stream for each direction.

    Two, since the copies back of one stream wait for those of it that leave.
    """

    def __init__(self, device: Device) -> None:
        self.device = device.torch_device
        self.to_host, self.to_device = device.host_copier(), device.host_copier()
        self._synchronize = device.synchronize

    def measured(self) -> Link:
        """Return the speed of the link, while nothing else uses it."""
        there = torch.empty(_SAMPLE, dtype=torch.uint8, device=self.device)
        host = self.to_host.to_host(there)
        self.to_host.wait_host()

        def send() -> None:
            self.to_host.to_host(there, host)
            self.to_host.wait_host()

        def fetch() -> None:
            self.to_device.to_device(host, there)
            self.to_device.wait_device()

        return Link(to_host=self._speed(send), to_device=self._speed(fetch))

    def _speed(self, copy: Callable[[], None]) -> float:
        seconds = []
        for _ in range(_TRIES):
            self._synchronize()
            begin = time.perf_counter()
            copy()
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return _SAMPLE / min(seconds)
