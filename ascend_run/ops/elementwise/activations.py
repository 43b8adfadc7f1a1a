"""Activations by the names that the fused feed-forwards and grouped products take.

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU and its sigmoid form), Shazeer 2020,
arXiv:2002.05202 (the gated ones).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F


def fast_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 * x)``."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "fastgelu": fast_gelu,
    "silu": F.silu,
}
GATED: Final = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Gated activations: the first half of the last axis is activated and gates the second."""


def activate(x: Tensor, name: str) -> Tensor:
    """[..., F] alike; [..., 2F] -> [..., F] for a gated one.

    Raises:
        ValueError: No activation has this name.
    """
    if name in GATED:
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[GATED[name]](gate) * up
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation {name!r}; expected one of {', '.join([*ACTIVATIONS, *GATED])}"
        )
    return ACTIVATIONS[name](x)
