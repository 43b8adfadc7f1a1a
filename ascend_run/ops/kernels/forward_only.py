"""Operators without a backward say so where they are called, not where a gradient is missing."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_gradient(name: str, *tensors: Tensor | None) -> None:
    """Refuse what would be differentiated.

    Raises:
        RuntimeError: Gradients are recorded and one of the tensors wants one.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name} has no backward; call it under torch.no_grad(), or detach its inputs"
        )
