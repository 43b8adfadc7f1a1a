"""Measure the link between a device and its host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from ascend_run.types.device import HostCopier

from .swap_plan import Link

_SAMPLE: Final = 32 << 20
"""Bytes that are copied to measure the link."""
_TRIES: Final = 3
"""Copies in each direction, of which the fastest one counts."""


def measured_link(
    to_host: HostCopier,
    to_device: HostCopier,
    device: torch.device,
    synchronize: Callable[[], None],
) -> Link:
    """Return the speed of the link, while nothing else uses it.

    Args:
        to_host, to_device: The channel of each direction; may be one.
        synchronize: Waits for all kernels of the device.
    """
    there = torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
    host = to_host.to_host(there)
    to_host.wait_host()

    def send() -> None:
        to_host.to_host(there, host)
        to_host.wait_host()

    def fetch() -> None:
        to_device.to_device(host, there)
        to_device.wait_device()

    return Link(to_host=_speed(send, synchronize), to_device=_speed(fetch, synchronize))


def _speed(copy: Callable[[], None], synchronize: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_TRIES):
        synchronize()
        begin = time.perf_counter()
        copy()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return _SAMPLE / min(seconds)
