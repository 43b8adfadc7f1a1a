"""Log-n scaling of queries."""

# S sequence, B micro-batch

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_n_scale(positions_BS: Tensor | None, length: int, dtype: torch.dtype) -> Tensor:
    """Positions within documents -> log-n scaling of queries, [S, B, 1, 1].

    Source: modeling_qwen.py of Qwen-7B, ``logn_tensor``, which evaluation alone applies.
    """
    assert positions_BS is not None, "log-n scaling needs the positions of the tokens"
    factor = torch.log(positions_BS.double() + 1) / math.log(length)
    return factor.clamp(min=1.0).t()[..., None, None].to(dtype)
