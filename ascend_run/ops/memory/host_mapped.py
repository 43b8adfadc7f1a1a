"""Tensors of a device in memory of its host, which operators of the device address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_step_
from ascend_run.ops.transfer.file_copier import Refusal, mapped_file, unload


class HostMapped:
    """Allocate tensors of a device that take no memory of it: its operators read and write them in
    memory of the host, over the link between the two.

    This form is that of a device whose memory is the host's.

    Args:
        device: Of the tensors.
    """

    every_operator: ClassVar[bool] = True
    """Whether all operators of the device take such tensors. Otherwise only the methods here
    do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of any values; it has at least one element."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def write(self, mapped: Tensor, values: Tensor) -> None:
        """Copy values, which may be of another device, to such a tensor. Numerics: bitwise."""
        mapped.copy_(values)

    def read(self, mapped: Tensor) -> Tensor:
        """Return the values of such a tensor in one that every operator takes: itself, or a
        copy."""
        return mapped

    def adamw_step_(
        self,
        options: Mapping[str, Any],
        params: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Take the next step of AdamW, of parameters with a gradient.

        Args:
            options: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as in a parameter group.
            states: Of each parameter: ``step``, ``exp_avg`` and ``exp_avg_sq``, changed in place;
                the moments may be such tensors.
        """
        adamw_step_(options, params, states)

    def rest(self, mapped: Iterable[Tensor]) -> None:
        """Expect that such tensors are not used for some time."""


class FileMapped(HostMapped):
    """Of the CPU: tensors in memory-mapped files without names. Their pages are loaded as they are
    used, and the system may write them to the disk and take them back at any time.

    Args:
        folder: Existing folder, on a disk: a file system in memory (tmpfs) saves nothing.
        refusal: See ``FileCopier``.
    """

    def __init__(self, folder: str, refusal: Refusal | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._folder = folder
        self._refusal = refusal

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros.

        Raises:
            OSError: The disk is full, or the folder cannot be written to; or its ``refusal``.
        """
        return mapped_file(self._folder, shape, dtype, self._refusal)

    def rest(self, mapped: Iterable[Tensor]) -> None:
        """Remove them from the memory of the process."""
        for tensor in mapped:
            unload(tensor)
