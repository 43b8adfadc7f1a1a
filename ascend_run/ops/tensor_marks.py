"""Attributes that others read on a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mark(tensor: Tensor, **marks: object) -> None:
    """Set attributes by which Megatron or the kernel knows a parameter (``allreduce``,
    ``sequence_parallel``, ``ascend_added_by``); torch's type declares none of them."""
    for name, value in marks.items():
        setattr(tensor, name, value)
