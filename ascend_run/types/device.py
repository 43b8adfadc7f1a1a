"""The device of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor


@attrs.frozen(kw_only=True)
class CommOptions:
    """Options of a process group's communicator; without them the backend's defaults hold."""

    buffer_mb: int  #: Its buffer, on backends with one for each communicator. Unit: MiB.
    why: str = ""  #: What the buffer has to hold, for ``plan``.


class Device(Protocol):
    """One rank's accelerator, or the CPU."""

    name: str  #: Of the platform: ``cpu`` ...
    backend: str  #: torch.distributed's: ``gloo``, ``nccl``, ``hccl``.
    torch_device: torch.device  #: With its index, if any.

    def activate(self) -> None:
        """Make this rank's device current; called once, before any process group exists."""

    def deactivate(self) -> None:
        """Undo what ``activate`` changed in this process."""

    def synchronize(self) -> None:
        """Wait for all queued kernels."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return the allocated bytes, and their peak since the last reset."""

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes that are allocated now."""

    def group_options(self, options: CommOptions) -> Any:
        """Return the backend's options of a process group; None if it has none of these."""

    def host_copier(self) -> HostCopier:
        """Return a channel for copies between device and host that overlap with computation."""

    def memory_pool(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function to a context manager, in which this thread allocates from a new pool of
        the device's caching allocator; None if it has no pools."""


class HostCopier(Protocol):
    """Copies to the host and back that overlap with computation if the device supports it."""

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Start a copy to the host, into ``out`` if given; it may be read after ``wait_host``."""

    def wait_host(self) -> None:
        """Make the compute stream wait for every started ``to_host``, after which the sources may
        be overwritten or freed."""

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Start a copy from the host into ``out``."""

    def wait_device(self) -> None:
        """Make the compute stream wait for every started ``to_device``."""
