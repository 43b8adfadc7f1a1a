"""Add updates to the parameters of a model that is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from ascend_run.tools.convert.formats.model_source import ModelSource

Update = Callable[[torch.dtype], Tensor]
"""Computes what is added to a parameter, in the dtype given: float32 or float64."""


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """Return the factor of ``B A``."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def merged(source: ModelSource, updates: Mapping[str, Update]) -> ModelSource:
    """Return the same model with updates added to some parameters.

    The sums are computed in float32, in float64 for such weights, and rounded once to the stored
    dtype.

    Args:
        updates: Parameter's name -> update of its first rows; all must exist.
    """

    def read(name: str) -> Tensor:
        tensor = source.tensor(name)
        if name not in updates:
            return tensor
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        update = updates[name](dtype)
        wide = tensor.to(dtype, copy=True)
        wide[: len(update)] += update
        return wide.to(tensor.dtype)

    return attrs.evolve(source, read=read, num_merged=len(updates))
