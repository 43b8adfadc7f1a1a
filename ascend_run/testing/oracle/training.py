"""Gradients of one global batch, and training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from torch import Tensor

from ascend_run.types.config import RunConfig

from .batches import Samples, micro_batches
from .model import GPT
from .muon import Muon
from .optimizer import AdamW
from .trace import Trace, traced


@attrs.frozen(kw_only=True)
class Gradients:
    """Of the mean loss over the trained tokens of one global batch."""

    loss: float
    tokens: int
    """Number of trained tokens."""
    micro_batches: int
    gradients: Mapping[str, Tensor | None]
    """Of each parameter that trains; None if the loss does not depend on it."""
    trace: Trace
    """Of the sum of the losses, not of their mean."""


@attrs.frozen(kw_only=True)
class Step:
    """One optimizer step."""

    loss: float
    tokens: int
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    gradients: Mapping[str, Tensor | None]
    """Of each parameter that trains, before clipping; None if the loss does not depend on it."""
    weights: Mapping[str, Tensor]
    """Every parameter after the step."""
    weight_decays: Mapping[str, float]
    """Of each parameter that trains."""


def gradients(config: RunConfig, weights: Mapping[str, Tensor], samples: Samples) -> Gradients:
    """Compute forward and backward of one global batch.

    Args:
        weights: Every parameter of the full model, by Megatron's name; a router's ``expert_bias``
            is 0 if it is not given.
        samples: Those of the global batch, in order.
    """
    model = loaded(config, weights)
    with traced(model) as trace:
        loss, tokens, count = _forward_backward(config, model, samples, trace)
    return Gradients(
        loss=loss,
        tokens=tokens,
        micro_batches=count,
        gradients={name: p.grad for name, p in _trained(model).items()},
        trace=trace,
    )


def steps(
    config: RunConfig, weights: Mapping[str, Tensor], samples: Samples, count: int
) -> Iterator[Step]:
    """Yield ``count`` steps, each on the next ``global_batch_size`` samples.

    Args: as ``gradients``; the samples are those of all steps.
    """
    model, size = loaded(config, weights), config.train.global_batch_size
    optimizer = (Muon if "muon" in config.enable else AdamW)(_trained(model), config)
    for step in range(count):
        batch = {name: field[step * size : (step + 1) * size] for name, field in samples.items()}
        model.zero_grad()
        loss, tokens, _ = _forward_backward(config, model, batch)
        found = {
            name: None if p.grad is None else p.grad.clone() for name, p in _trained(model).items()
        }
        for router in model.routers():
            router.update_bias()
        rate, norm = optimizer.step()
        yield Step(
            loss=loss,
            tokens=tokens,
            grad_norm=norm,
            learning_rate=rate,
            gradients=found,
            weights={name: p.detach().clone() for name, p in model.named_parameters()},
            weight_decays=optimizer.weight_decays,
        )


def loaded(config: RunConfig, weights: Mapping[str, Tensor]) -> GPT:
    """Build the model with these weights.

    Raises:
        KeyError: They are not those of the model.
    """
    model = GPT(config)
    needed, known = {name for name, _ in model.named_parameters()}, model.state_dict().keys()
    if wrong := sorted((needed - weights.keys()) | (weights.keys() - known)):
        raise KeyError(f"weights that only the oracle or only the run has: {', '.join(wrong)}")
    model.load_state_dict({**model.state_dict(), **weights})
    return model


def _trained(model: GPT) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _forward_backward(
    config: RunConfig, model: GPT, samples: Samples, trace: Trace | None = None
) -> tuple[float, int, int]:
    """Set the gradients of the mean loss over a global batch.

    Returns:
        The mean loss, the number of trained tokens, and that of micro-batches.
    """
    batches, loss_sum = [*micro_batches(config, samples)], 0.0
    tokens = sum(int((batch.loss_mask_BS > 0).sum()) for batch in batches)
    routed = sum(batch.tokens_BS.numel() for batch in batches)
    for index, batch in enumerate(batches):
        if trace is not None:
            trace.see_batch(index, batch)
        loss, objective = model(batch, tokens / routed)
        objective.backward()
        loss_sum += float(loss.detach())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= max(tokens, 1)
    return loss_sum / max(tokens, 1), tokens, len(batches)
