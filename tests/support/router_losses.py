"""The gradients that routers' losses add, and the losses written from their formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ascend_run.core.train.step import ForwardBackward
from ascend_run.testing.dry_run import DryRun, gradient_of

from .small_runs import standing_rank

COEFFICIENT: Final = 0.5
ROUTER: Final = "decoder.layers.0.mlp.router.weight"


def aux_loss(logit_TX: Tensor) -> Tensor:
    """Return ``X * sum_i f_i P_i`` of two selected experts a token."""
    score_TX = logit_TX.softmax(1)
    chosen_TX = torch.zeros_like(score_TX).scatter(1, score_TX.topk(2).indices, 1.0)
    return len(score_TX[0]) * (chosen_TX.mean(0) / 2 * score_TX.mean(0)).sum()


def z_loss(logit_TX: Tensor) -> Tensor:
    return logit_TX.logsumexp(1).square().mean()


def of_router_losses(
    values: Mapping[str, Any],
    losses: Mapping[str, Any],
    samples_of: Callable[[DryRun], Any],
) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """Return the gradients of the routers' losses alone, of a model with one layer; then the
    router's weight, and its input [S, B, H] in each micro-batch.

    Args:
        losses: The coefficients.
        samples_of: Returns the samples of a global batch.
    """
    found, inputs = [], []
    for more in ({}, losses):
        with standing_rank({**values, "model.moe_aux_loss_coeff": 0.0, **more}) as (hooks, context):
            dry_run, inputs = DryRun(hooks, context), []
            step = dry_run.for_gradients(torch.float64)
            (router,) = (m for m in dry_run.bundle.chunks[0].modules() if hasattr(m, "loss_scale"))
            router.register_forward_pre_hook(lambda _, x, to=inputs: to.append(x[0].detach()))
            weight = router.weight.detach().clone()
            found.append(_gradients(dry_run, step, samples_of(dry_run)))
    without, both = found
    return {name: both[name] - without[name] for name in both}, weight, inputs


def _gradients(dry_run: DryRun, step: ForwardBackward, samples: Any) -> dict[str, Tensor]:
    for chunk in dry_run.bundle.chunks:
        chunk.zero_grad_buffer()
    step(dry_run.batches(samples), dry_run.plan.num_microbatches)
    found = dry_run.shards(gradient_of)
    return {one.name: one.tensor.clone() for one in found if one.tensor is not None}


def assert_gradient_of_mean(
    gradient: Tensor, loss: Callable[[Tensor], Tensor], weight: Tensor, inputs: list[Tensor]
) -> None:
    """Compare the router's gradient with that of the mean over micro-batches of equal size."""
    weight = weight.clone().requires_grad_()
    losses = [loss((x_SBH @ weight.t()).flatten(0, 1)) for x_SBH in inputs]
    (COEFFICIENT * torch.stack(losses).mean()).backward()
    assert weight.grad is not None
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-9, atol=1e-14)
    assert float(weight.grad.abs().max()) > 1e-4
