"""Errors at the call of operators without a backward, rather than a missing gradient later."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_gradient(name: str, *tensors: Tensor | None) -> None:
    """Raise an error if the call would record a gradient.

    Raises:
        RuntimeError: If gradients are enabled and one of the tensors requires one.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name} has no backward; call it under torch.no_grad(), or detach its inputs"
        )
