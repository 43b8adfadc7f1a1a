"""A feed-forward that keeps nothing but its input."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import nn


def recomputed(module: nn.Module) -> nn.Module:
    """The same module, with a forward that runs again in backward.

    By Megatron's checkpoint, which replays the random generators of every parallel rank.
    """
    inner = module.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states, *args, **kwargs)
        return checkpoint(lambda x: inner(x, *args, **kwargs), False, hidden_states)

    module.forward = forward
    return module
