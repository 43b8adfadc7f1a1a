"""The GPU of one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from ascend_run.ops.transfer.stream_copier import StreamCopier
from ascend_run.plugin_api import CommOptions, PlatformError


class CudaDevice:
    """A GPU behind the ``Device`` contract.

    Args:
        local_rank: Index of the GPU on this machine.

    Raises:
        PlatformError: This machine has no GPU for this rank.
    """

    name = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int = 0) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if local_rank >= count:
            built = "" if torch.version.cuda else f" (torch {torch.__version__} has no CUDA)"
            raise PlatformError(
                f"platform cuda: rank {local_rank} of this machine has no GPU; torch sees "
                f"{count}{built}; start at most that many ranks here, or run on another platform: "
                "--platform cpu"
            )
        self.torch_device = torch.device("cuda", local_rank)

    def activate(self) -> None:
        """Make the device current."""
        torch.cuda.set_device(self.torch_device)

    def deactivate(self) -> None:
        """Do nothing: there is no state to restore."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the allocated bytes now, and their peak since the reset."""
        device = self.torch_device
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def group_options(self, options: CommOptions) -> None:
        """Return None: NCCL_BUFFSIZE is one size for all communicators of a process."""

    def host_copier(self) -> StreamCopier:
        return StreamCopier(torch.cuda)

    def memory_pool(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a pool that others may use before memory runs out."""
        pool = torch.cuda.MemPool(use_on_oom=True)
        return partial(torch.cuda.use_mem_pool, pool, self.torch_device)
