"""Norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.operators import norm as norms

from .draws import B, H, S, draw


def rms_norm(device: torch.device, *, backward: bool, dtype: torch.dtype) -> Any:
    x, weight = draw(device, S, B, H, dtype=dtype), draw(device, H, dtype=dtype)
    if not backward:
        return operators.rms_norm(x, weight, 1e-5)
    return operators.rms_norm_backward(x, x, weight, draw(device, S, B, 1))


def add_norm(device: torch.device, *, layer: bool, dtype: torch.dtype) -> Any:
    x, weight = draw(device, S, B, H, dtype=dtype), draw(device, H, dtype=dtype)
    if layer:
        return norms.add_layer_norm(x, x, weight, weight, 1e-5)
    return norms.add_rms_norm(x, x, weight, 1e-5)


CALLS = {
    "rms_norm float32": partial(rms_norm, backward=False, dtype=torch.float32),
    "rms_norm bfloat16": partial(rms_norm, backward=False, dtype=torch.bfloat16),
    "add layer_norm float32": partial(add_norm, layer=True, dtype=torch.float32),
    "add layer_norm bfloat16": partial(add_norm, layer=True, dtype=torch.bfloat16),
    "add rms_norm float32": partial(add_norm, layer=False, dtype=torch.float32),
    "add rms_norm bfloat16": partial(add_norm, layer=False, dtype=torch.bfloat16),
    "rms_norm backward": partial(rms_norm, backward=True, dtype=torch.bfloat16),
}
