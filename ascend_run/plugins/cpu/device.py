"""One rank's share of the host, in the shape of an accelerator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from .allocator import keep_freed_memory, release_freed_memory

if TYPE_CHECKING:
    from torch import Tensor

    from .facade import Facade


class CpuDevice:
    """The CPU behind the ``Device`` contract.

    Args:
        local_rank: Position among this machine's ranks; the CPU has one device for all of them.
    """

    name = "cpu"
    backend = "gloo"

    def __init__(self, local_rank: int = 0) -> None:
        self.local_rank = local_rank
        self.torch_device = torch.device("cpu")
        self._facade: Facade | None = None
        self._peak_bytes = 0

    def activate(self) -> None:
        """Let Megatron use the CPU as its accelerator; see ``facade``. Idempotent."""
        if self._facade is None:
            from .facade import Facade

            facade = Facade(self)
            facade.install()
            self._facade = facade
            keep_freed_memory()

    def deactivate(self) -> None:
        """Put back every object that ``activate`` replaced."""
        if self._facade is not None:
            self._facade.remove()
            self._facade = None
            release_freed_memory()

    def synchronize(self) -> None:
        """Nothing is queued: operations on the CPU are done when they return."""

    def memory_bytes(self) -> tuple[int, int]:
        """Resident bytes of this process now, and the most seen by a reading since the reset.

        The peak is one of readings, not of instants: the system's own high-water mark cannot be
        reset without privileges.
        """
        import psutil

        now = psutil.Process(os.getpid()).memory_info().rss
        self._peak_bytes = max(self._peak_bytes, now)
        return now, self._peak_bytes

    def reset_peak_memory(self) -> None:
        self._peak_bytes = 0

    def host_copier(self) -> SynchronousCopier:
        return SynchronousCopier()


class SynchronousCopier:
    """Copies that are done when they return: device and host are one memory here.

    The copy is real, so that what swaps activations behaves as it would on an accelerator.
    """

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
        return host.copy_(tensor.detach())

    def wait_host(self) -> None:
        """Nothing is pending."""

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.detach().copy_(host)

    def wait_device(self) -> None:
        """Nothing is pending."""
