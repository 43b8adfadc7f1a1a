"""Tensors of a GPU in pinned memory of the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.memory.host_mapped import HostMapped


class PinnedMemory(HostMapped):
    """HostMapped on pinned memory, which with unified addressing has the same addresses on the GPU.

    It is not managed memory, which moves to the GPU when it is used and leaves only under pressure.
    torch's allocator of pinned memory rounds each tensor up to a power of two.
    """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        pinned = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
        addressed = torch.as_tensor(_Addressed(pinned), device=self.device)
        return addressed.view(dtype).view(*shape)


class _Addressed:
    """Bytes of pinned memory as an array of the GPU; torch's tensor of it holds it."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._pinned.numel(),),
            "typestr": "|u1",
            "data": (self._pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
