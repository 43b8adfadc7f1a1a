"""Activations by the names that fused MLPs and grouped GEMMs take.

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU and its sigmoid approximation), Shazeer
2020, arXiv:2002.05202 (the gated ones).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F


def fast_gelu(x: Tensor) -> Tensor:
    """Compute ``x * sigmoid(1.702 * x)``."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "fastgelu": fast_gelu,
    "silu": F.silu,
}
GATED: Final = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Gated activations: the first half of the last dim is activated and gates the second."""


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation by name: [..., F] to the same shape, or [..., 2F] to [..., F] if gated.

    Raises:
        ValueError: If no activation has this name.
    """
    if name in GATED:
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[GATED[name]](gate) * up
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation {name!r}; expected one of {', '.join([*ACTIVATIONS, *GATED])}"
        )
    return ACTIVATIONS[name](x)
