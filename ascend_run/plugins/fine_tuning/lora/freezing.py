"""Freeze everything but the adapters, and make gradients reach the adapters."""

from __future__ import annotations

from typing import Any

import structlog
import torch
from torch import Tensor, nn

from ascend_run.ops.linear.peft_settings import is_saved
from ascend_run.plugin_api import ForwardLink, RunContext
from ascend_run.types.forward import Forward

from .adapter import ADDED_BY
from .expert_adapter import every_adapter
from .magnitudes import initialize


def freeze(model: nn.Module, modules: frozenset[str] = frozenset()) -> None:
    """Disable gradients of every parameter that belongs neither to an adapter nor to a module that
    is trained in full."""
    for name, parameter in model.named_parameters():
        is_added = getattr(parameter, "ascend_added_by", None) == ADDED_BY
        parameter.requires_grad_(is_added or is_saved(name, modules))


def begin_graph(embedding: nn.Module) -> ForwardLink:
    """Make the embedding's output require a gradient.

    A recomputed layer gets no gradient if none of its inputs requires one, even if its parameters
    do: the adapters in it would silently not train.
    """

    def wrap(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = inner(*args, **kwargs)
            if torch.is_grad_enabled() and not out.requires_grad:
                out.requires_grad_()
            return out

        return forward

    return ForwardLink(wrap=wrap, compilable=False)


def begin_magnitudes(context: RunContext, role: str) -> None:
    """Set DoRA's magnitudes by the weights that have been loaded since the model was built."""
    bundle = context.models[role]
    for chunk in bundle.chunks:
        initialize(chunk)
    if bundle.optimizer is not None:
        bundle.optimizer.reload_model_params()


def log_trained_parameters(context: RunContext, role: str) -> None:
    """Log the number of trained parameters on this rank."""
    parameters = [p for chunk in context.models[role].chunks for p in chunk.parameters()]
    structlog.get_logger().info(
        "lora.adapters",
        adapters=sum(len(every_adapter(chunk)) for chunk in context.models[role].chunks),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
    )
