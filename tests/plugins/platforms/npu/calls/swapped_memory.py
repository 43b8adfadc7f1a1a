"""Memory of the host, and AdamW with its moments there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu.operators import swapped_memory as operators

from .draws import D, H, draw


def empty(device: torch.device, *, dtype: torch.dtype) -> Any:
    return operators.empty_with_swapped_memory((H, D), dtype, device)


def adam_w(device: torch.device, *, dtype: torch.dtype) -> Any:
    var, m, v, grad = (draw(device, H, D, dtype=dtype) for _ in range(4))
    powers = {"beta1_power": 0.9, "beta2_power": 0.99}
    options = {"lr": 0.1, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    operators.apply_adam_w_(var, m, v.abs(), grad, **powers, **options)
    return [var, m, v]


CALLS = {
    **{
        f"swapped memory {dtype}".replace("torch.", ""): partial(empty, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"AdamW {dtype}".replace("torch.", ""): partial(adam_w, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    },
}
