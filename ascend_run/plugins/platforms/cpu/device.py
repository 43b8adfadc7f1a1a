"""The CPU as one rank's device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from .allocator import keep_freed_memory, map_large_blocks, release_freed_memory
from .memory import HostMemory

if TYPE_CHECKING:
    from torch import Tensor

    from ascend_run.plugin_api import CommOptions


class CpuDevice:
    """The CPU behind the ``Device`` contract.

    Megatron takes it for its accelerator while the platform's patches are applied; see ``facade``.

    Args:
        local_rank: Index among this machine's ranks, which share one device.
        memory: Reads this process's memory; default: a reader with its own peak.
        keeps_freed: See ``CpuOptions.keep_freed_memory``.
    """

    name = "cpu"
    backend = "gloo"

    def __init__(
        self, local_rank: int = 0, memory: HostMemory | None = None, keeps_freed: bool = True
    ) -> None:
        self.local_rank = local_rank
        self.torch_device = torch.device("cpu")
        self._memory = memory or HostMemory()
        self._keeps_freed = keeps_freed

    def activate(self) -> None:
        """Set how the C library treats freed memory."""
        if self._keeps_freed:
            keep_freed_memory()
        else:
            map_large_blocks()

    def deactivate(self) -> None:
        """Release freed memory; let torch.compile look again whether there is a GPU for Triton."""
        release_freed_memory()
        if triton := sys.modules.get("torch.utils._triton"):
            triton.has_triton.cache_clear()

    def synchronize(self) -> None:
        """Do nothing: operations on the CPU are complete when they return."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return the resident bytes now, and the highest reading since the reset."""
        return self._memory.memory_bytes()

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes that are allocated now."""
        self._memory.reset_peak_memory()

    def group_options(self, options: CommOptions) -> None:
        """Return None: gloo has no buffer for each group."""

    def host_copier(self) -> SynchronousCopier:
        """Return a channel whose copies are complete when the calls return."""
        return SynchronousCopier()

    def memory_pool(self) -> None:
        """Return None: the C library allocates."""


class SynchronousCopier:
    """Copy synchronously: device memory is host memory here.

    The copy is real, so that activation offloading behaves as on an accelerator.
    """

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        source, host = tensor.detach(), out
        if host is None:
            host = torch.empty_like(source, memory_format=torch.contiguous_format)
        return host.copy_(source)

    def wait_host(self) -> None:
        """Do nothing: no copy is pending."""

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.detach().copy_(host)

    def wait_device(self) -> None:
        """Do nothing: no copy is pending."""
