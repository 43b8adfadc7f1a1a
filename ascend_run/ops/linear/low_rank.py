"""Low-rank updates of weights (LoRA): ``W + scale * B A``.

Source: arXiv:2106.09685; the scale of rsLoRA: arXiv:2312.03732.
"""

# R rank, K inputs, M outputs

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from .adapter_parts import selectors

_T = TypeVar("_T")


def of_part(pattern: Mapping[str, _T], linear: str, part: str, default: _T) -> _T:
    """Return what a pattern has for a part of a linear, by the first of its names that the pattern
    has, else for the linear, else the default."""
    names = (*selectors(part), linear)
    return next((pattern[name] for name in names if name in pattern), default)


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """Return the factor of ``B A``: alpha / rank, or with rsLoRA alpha / sqrt(rank)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def low_rank_update(a_RK: Tensor, b_MR: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return ``scale * B A``, [M, K], computed in ``dtype``."""
    return scale * (b_MR.to(dtype) @ a_RK.to(dtype))


def with_update(weight_MK: Tensor, update: Tensor, magnitude_M: Tensor | None = None) -> Tensor:
    """Return a weight with an update added, in a new tensor.

    Numerics: the sum is computed in the update's dtype and converted to the weight's.

    Args:
        update: Of the weight's first rows.
        magnitude_M: Norms that these rows get (DoRA, arXiv:2402.09353); 0: the row keeps its own.
    """
    wide = weight_MK.to(update.dtype, copy=True)
    rows = wide[: len(update)]
    rows += update
    if magnitude_M is not None:
        norms = torch.linalg.vector_norm(rows, dim=-1)
        magnitude = magnitude_M.to(update.dtype)
        rows *= torch.where(magnitude != 0, magnitude / norms, 1.0).unsqueeze(-1)
    return wide.to(weight_MK.dtype)
