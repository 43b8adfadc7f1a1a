"""Copies between a device and its host on side streams, overlapped with the computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StreamCopier:
    """plugin_api's HostCopier on pinned memory and two side streams, one for each direction.

    The computation's stream waits for copies; the host never does.

    Args:
        streams: ``torch.cuda``, or a module of the same functions (``torch.npu``).
        pin: Whether host memory is pinned; without it copies are synchronous.
    """

    def __init__(self, streams: Any, *, pin: bool = True) -> None:
        self._streams = streams
        self._pin = pin
        self._to_host = streams.Stream()
        self._to_device = streams.Stream()

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Start a copy after the queued work of the current stream."""
        source, host = tensor.detach(), out
        if host is None:
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pin)
        self._to_host.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._to_host):
            host.copy_(source, non_blocking=True)
        return host

    def wait_host(self) -> None:
        """Make the current stream wait for all copies to the host; their memory may then be
        freed."""
        self._streams.current_stream().wait_stream(self._to_host)

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Start a copy to ``out``, after the copies to the host and the queued work that uses
        ``out``."""
        self._to_device.wait_stream(self._to_host)
        self._to_device.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._to_device):
            out.detach().copy_(host, non_blocking=True)

    def wait_device(self) -> None:
        """Make the current stream wait for all copies to the device."""
        self._streams.current_stream().wait_stream(self._to_device)
