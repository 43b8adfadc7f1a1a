"""A forward that saves its input only, and is repeated by its backward or before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.recomputed import RandomState


def saving_input(
    forward: Callable[[Tensor], Tensor], random_state: RandomState, x: Tensor
) -> tuple[Tensor, Any]:
    """Call a forward, of which only the input is saved.

    Args:
        random_state: The present state of the random generators.

    Returns:
        The output, and the node of the graph to call ``repeat`` with.
    """
    out: Tensor = _InputSaved.apply(forward, random_state, x)
    return out, out.grad_fn


def repeat(node: Any) -> None:
    """Repeat a forward, with its graph; once, further calls do nothing."""
    if node.repeated is not None:
        return
    (saved,) = node.saved_tensors
    x = saved.detach().requires_grad_()
    with torch.enable_grad(), node.random_state():
        node.repeated = x, node.forward_again(x)


class _InputSaved(Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensor], Tensor], random_state: RandomState, x: Tensor
    ) -> Tensor:
        ctx.forward_again, ctx.random_state, ctx.repeated = forward, random_state, None
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None]:
        repeat(ctx)
        x, out = ctx.repeated
        ctx.repeated = ctx.forward_again = None
        torch.autograd.backward(out, gradients)
        return None, None, x.grad
