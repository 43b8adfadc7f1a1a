"""Activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu import operators

from .draws import B, H, S, draw


def swiglu(device: torch.device, *, backward: bool) -> Any:
    gate_up = draw(device, S, B, 2 * H)
    if not backward:
        return operators.swiglu(gate_up)
    return operators.swiglu_backward(draw(device, S, B, H), gate_up)


CALLS = {
    "swiglu": partial(swiglu, backward=False),
    "swiglu backward": partial(swiglu, backward=True),
}
