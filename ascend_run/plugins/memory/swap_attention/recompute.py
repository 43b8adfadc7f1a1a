"""Recompute an MLP in backward: only its input is saved."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor, nn

from ascend_run.plugin_api import ForwardLink
from ascend_run.types.forward import Forward


def recomputed(module: nn.Module) -> ForwardLink:
    """Return a link that recomputes a module's forward in backward.

    It uses Megatron's checkpoint, which restores the random generators of every parallel rank.
    """

    def wrap(inner: Forward) -> Forward:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(hidden_states, *args, **kwargs)
            return checkpoint(lambda x: inner(x, *args, **kwargs), False, hidden_states)

        return forward

    return ForwardLink(wrap=wrap, compilable=False)
