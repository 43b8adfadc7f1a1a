"""Rotary position embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu import operators

from .draws import B, D, N, S, draw


def rotary(device: torch.device, *, interleaved: bool) -> Any:
    cos, sin = draw(device, S, 1, 1, D), draw(device, S, 1, 1, D)
    return operators.rotary_mul(draw(device, S, B, N, D), cos, sin, interleaved)


CALLS = {
    "rotary half": partial(rotary, interleaved=False),
    "rotary interleaved": partial(rotary, interleaved=True),
}
