"""torch's allocator itself, on a device, with the interface of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.memory.plain_allocator import Layout


class DeviceAllocator:
    """New pools of it, in which nothing else allocates.

    Args:
        device: Its type; the first one is taken.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device, 0)
        self._module: Any = torch.get_device_module(self._device)
        self._pools: dict[str, Any] = {}
        self._held: dict[object, Tensor] = {}

    def allocate(self, holder: object, nbytes: int, pool: str) -> None:
        if pool not in self._pools:
            self._pools[pool] = self._module.MemPool()
        with self._module.use_mem_pool(self._pools[pool], self._device):
            self._held[holder] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free(self, holder: object) -> None:
        del self._held[holder]

    @property
    def layout(self) -> Layout:
        ours = {pool.id for pool in self._pools.values()}
        return [
            [(block["size"], block["state"] == "inactive") for block in segment["blocks"]]
            for segment in self._module.memory_snapshot()
            if segment["segment_pool_id"] in ours
        ]
