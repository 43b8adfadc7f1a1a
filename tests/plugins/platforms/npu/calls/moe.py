"""MoE token permutation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ascend_run.plugins.platforms.npu.operators import moe as operators

from .draws import H, T, draw

K = 2


def _experts(device: torch.device) -> Any:
    return torch.arange(T * K, device=device).view(T, K) % 3


def _places(device: torch.device) -> Any:
    return torch.arange(T * K, dtype=torch.int32, device=device).flip(0)


def permute(device: torch.device, *, kept: int | None, dtype: torch.dtype) -> Any:
    return operators.moe_token_permute(draw(device, T, H, dtype=dtype), _experts(device), kept)


def permute_backward(device: torch.device) -> Any:
    rows, tokens = draw(device, T * K, H), draw(device, T, H)
    return operators.moe_token_permute_grad(rows, tokens, _experts(device), _places(device))


def unpermute(device: torch.device, *, weighted: bool, backward: bool) -> Any:
    rows = draw(device, T * K, H)
    probs = draw(device, T, K) if weighted else None
    if not backward:
        return operators.moe_token_unpermute(rows, _places(device), probs)
    dtokens = draw(device, T if weighted else T * K, H)
    return operators.moe_token_unpermute_grad(dtokens, rows, _places(device), probs)


CALLS = {
    "token permute": partial(permute, kept=None, dtype=torch.float32),
    "token permute dropped": partial(permute, kept=15, dtype=torch.bfloat16),
    "token permute backward": permute_backward,
    "token unpermute": partial(unpermute, weighted=True, backward=False),
    "token unpermute unweighted": partial(unpermute, weighted=False, backward=False),
    "token unpermute backward": partial(unpermute, weighted=True, backward=True),
    "token unpermute unweighted backward": partial(unpermute, weighted=False, backward=True),
}
