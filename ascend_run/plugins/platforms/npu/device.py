"""The NPU of one rank, through torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, cast

import torch

from ascend_run.ops.transfer.stream_copier import StreamCopier
from ascend_run.plugin_api import CommOptions, PlatformError

OLDEST: Final = (2, 7)
"""Oldest release of torch_npu whose operators take the calls made here; ``gaps.py`` lists which
later releases lack which operator."""
_INSTALL = (
    "pip install 'ascend-run[npu]' on a machine with CANN (source its set_env.sh first), or run on "
    "another platform: --platform cpu"
)


class NpuDevice:
    """An NPU behind the ``Device`` contract.

    Megatron names ``torch.cuda``; torch_npu's ``transfer_to_npu`` maps it to the NPU for the rest
    of the process, so ``deactivate`` cannot restore it.

    Args:
        local_rank: Index of the NPU on this machine.

    Raises:
        PlatformError: torch_npu or the device is missing, or torch_npu is too old.
    """

    name = "npu"
    backend = "hccl"

    def __init__(self, local_rank: int = 0) -> None:
        self._npu = _require_npu(local_rank)
        self.torch_device = torch.device("npu", local_rank)

    def activate(self) -> None:
        """Make the device current, and map ``torch.cuda`` to it."""
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        self._npu.set_device(self.torch_device)

    def deactivate(self) -> None:
        """Do nothing: ``transfer_to_npu`` cannot be undone."""

    def synchronize(self) -> None:
        self._npu.synchronize(self.torch_device)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the allocated bytes now, and their peak since the reset."""
        device = self.torch_device
        return self._npu.memory_allocated(device), self._npu.max_memory_allocated(device)

    def reset_peak_memory(self) -> None:
        self._npu.reset_peak_memory_stats(self.torch_device)

    def group_options(self, options: CommOptions) -> Any:
        """Return hccl's options, with the size of the communicator's buffer."""
        module: Any = importlib.import_module("torch_npu")
        of_hccl = module._C._distributed_c10d.ProcessGroupHCCL.Options()
        of_hccl.hccl_config = {"hccl_buffer_size": options.buffer_mb}
        return of_hccl

    def host_copier(self) -> StreamCopier:
        return StreamCopier(self._npu)

    def memory_pool(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self._npu.use_mem_pool, self._npu.MemPool(), self.torch_device)


def _require_npu(local_rank: int) -> Any:
    """Return ``torch.npu`` after checking that this rank has a device."""
    if importlib.util.find_spec("torch_npu") is None:
        raise PlatformError(f"platform npu: torch_npu is not installed; {_INSTALL}")
    try:
        module = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PlatformError(
            f"platform npu: torch_npu cannot be imported: {reason}; {_INSTALL}"
        ) from error
    _refuse_old(str(getattr(module, "__version__", "")))
    npu = cast("Any", torch).npu  # added by torch_npu
    count = npu.device_count() if npu.is_available() else 0
    if local_rank >= count:
        raise PlatformError(
            f"platform npu: rank {local_rank} of this machine has no NPU; torch_npu sees {count}; "
            "start at most that many ranks here, or run on another platform: --platform cpu"
        )
    return npu


def _refuse_old(version: str) -> None:
    """Reject an old release; one without a version number passes."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise PlatformError(
            f"platform npu: torch_npu {version} is too old; expected {oldest} or later: "
            f"pip install 'torch-npu>={oldest}' with the torch of the same version"
        )
