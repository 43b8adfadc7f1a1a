"""The device of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Device(Protocol):
    """One rank's accelerator, or the CPU standing in for it."""

    name: str
    backend: str
    """torch.distributed's: ``gloo``, ``nccl``, ``hccl``."""
    torch_device: torch.device

    def activate(self) -> None:
        """Make this rank's device current; called once, before any process group exists."""
        ...

    def deactivate(self) -> None:
        """Put back whatever ``activate`` changed in this process."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """(now, peak since the last reset)."""
        ...

    def reset_peak_memory(self) -> None: ...

    def host_copier(self) -> HostCopier:
        """A channel for copies between device and host beside the computation."""
        ...


class HostCopier(Protocol):
    """Copies to the host and back that overlap with computation where the device can."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start copying; the answer may be read after ``wait_host``."""
        ...

    def wait_host(self) -> None:
        """Make the computation wait until every started ``to_host`` has landed, after which the
        sources may be overwritten or freed."""
        ...

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Start copying back into ``out``."""
        ...

    def wait_device(self) -> None:
        """Make the computation wait until every started ``to_device`` has landed."""
        ...
