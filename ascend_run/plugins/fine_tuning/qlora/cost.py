"""Bytes of quantised weights. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ascend_run.plugin_api import CostChange, Phase, WorkingMemory

if TYPE_CHECKING:
    from ascend_run.plugin_api import ParameterCost, PipelineStage

    from . import QloraOptions

_GROUP = 256
"""Scales that share one, see ``ops.linear.compressed_scales``."""


def quantised_cost(rank: PipelineStage, options: QloraOptions) -> CostChange:
    """Return the bytes of the weights of linears, and those of one dequantised weight, of the
    largest in each part of a layer, while it is used."""
    linears = [
        one
        for one in rank.parameters
        if one.layer is not None and one.is_matrix and one.name.startswith("linear_")
    ]
    largest: dict[str, int] = {}
    for one in linears:
        largest[one.part] = max(one.numel, largest.get(one.part, 0))
    return CostChange(
        stored={(one.layer or 0, one.key): _stored_bytes(one, options) for one in linears},
        working=tuple(
            WorkingMemory(
                part=part, name="dequantised weight", nbytes=numel * rank.item_bytes, phase=phase
            )
            for part, numel in largest.items()
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ),
    )


def _stored_bytes(weight: ParameterCost, options: QloraOptions) -> float:
    scales = math.ceil(weight.numel / options.blocksize)
    codes = math.ceil(weight.numel / 2)
    if not options.use_double_quant:
        return codes + 4 * scales
    return codes + scales + 4 * math.ceil(scales / _GROUP) + 4
