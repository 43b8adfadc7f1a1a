"""Everything but the adapters frozen, and gradients that reach the adapters all the same."""

from __future__ import annotations

from typing import Any

import structlog
import torch
from torch import Tensor, nn

from ascend_run.plugin_api import RunContext

from .adapter import ADDED_BY, adapters


def freeze(model: nn.Module) -> None:
    """No gradient for any parameter that is not an adapter's."""
    for parameter in model.parameters():
        if getattr(parameter, "ascend_added_by", None) != ADDED_BY:
            parameter.requires_grad_(False)


def begin_graph(embedding: nn.Module) -> nn.Module:
    """The embedding, with an output that asks for a gradient.

    A layer that is computed again in backward has none where no input of it asks for one, whatever
    it holds: the adapters in it would stay as they are without a word.
    """
    inner = embedding.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = inner(*args, **kwargs)
        if torch.is_grad_enabled() and not out.requires_grad:
            out.requires_grad_()
        return out

    embedding.forward = forward
    return embedding


def tell(context: RunContext, role: str) -> None:
    """Log how much is trained on this rank."""
    parameters = [p for chunk in context.models[role].chunks for p in chunk.parameters()]
    structlog.get_logger().info(
        "lora.adapters",
        adapters=sum(len(adapters(chunk)) for chunk in context.models[role].chunks),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
    )
