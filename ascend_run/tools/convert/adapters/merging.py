"""Add updates to the parameters of a model that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from ascend_run.ops.linear.low_rank import with_update
from ascend_run.tools.convert.formats.model_source import ModelSource

Update = Callable[[torch.dtype], tuple[Tensor, Tensor | None]]
"""Computes what is added to a parameter, in the dtype given, float32 or float64, and the norms that
its rows then get, if they get any."""


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
        return with_update(tensor, *updates[name](dtype))

    return attrs.evolve(source, read=read, num_merged=len(updates))
