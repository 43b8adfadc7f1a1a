"""Gradients of one global batch, and some training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ascend_run.types.config import RunConfig

from .batches import Sample, micro_batches
from .model import GPT
from .optimizer import AdamW, learning_rate, weight_decay
from .trace import Rows, Trace, traced


@attrs.frozen(kw_only=True)
class Result:
    """What the oracle computed, by parameter name where it is one of each; all in float64."""

    loss: float
    """Mean over the trained tokens of the first global batch."""
    gradients: Mapping[str, Tensor | None]
    """Of the mean loss over the first global batch; of each parameter that trains."""
    micro_batches: int
    """In a global batch."""
    forward: Rows
    """Moments of every module's inputs and outputs in the first global batch."""
    backward: Rows
    """Moments of their gradients, of the sum of the losses."""
    losses: Sequence[float]
    """Mean of each step's global batch."""
    tokens: Sequence[int]
    """Trained tokens of each step."""
    grad_norms: Sequence[float]
    """Of each step, before clipping."""
    weights: Sequence[Mapping[str, Tensor]]
    """Every parameter after each step."""
    weight_decays: Mapping[str, float]
    """Of each parameter that trains."""
    learning_rates: Sequence[float]
    """Of each step."""


def train(
    config: RunConfig, weights: Mapping[str, Tensor], samples: Sequence[Sample], steps: int
) -> Result:
    """Compute the gradients of the first global batch, then take steps from the same weights.

    Args:
        weights: Every parameter of the full model, by Megatron's name; a router's ``expert_bias``
            is 0 if it is not given.
        samples: Those of all steps, in order.
        steps: Optimizer steps.
    """
    size = config.train.global_batch_size
    batches = [samples[step * size : (step + 1) * size] for step in range(steps)]
    model = loaded(config, weights)
    with traced(model) as trace:
        loss, _, count = _forward_backward(config, model, batches[0], trace)
    gradients = {name: p.grad for name, p in _trained(model).items()}
    step_of = _Steps(config, loaded(config, weights))
    taken = [step_of(batch) for batch in batches]
    return Result(
        loss=loss,
        gradients=gradients,
        micro_batches=count,
        forward=trace.forward,
        backward=trace.backward,
        losses=[one.loss for one in taken],
        tokens=[one.tokens for one in taken],
        grad_norms=[one.grad_norm for one in taken],
        weights=[one.weights for one in taken],
        weight_decays={
            name: weight_decay(p, config.optimizer) for name, p in _trained(model).items()
        },
        learning_rates=[learning_rate(config, step) for step in range(steps)],
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
    config: RunConfig, model: GPT, samples: Sequence[Sample], trace: Trace | None = None
) -> tuple[float, int, int]:
    """Set the gradients of the mean loss over a global batch.

    Returns:
        The mean loss, the number of trained tokens, and that of micro-batches.
    """
    loss_sum, tokens, count = 0.0, 0, 0
    for count, batch in enumerate(micro_batches(config, samples), start=1):
        if trace is not None:
            trace.micro_batch = count - 1
            trace.see_batch(batch)
        loss, objective = model(batch)
        objective.backward()
        loss_sum += float(loss.detach())
        tokens += int(batch.loss_mask_BS.sum())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= max(tokens, 1)
    return loss_sum / max(tokens, 1), tokens, count


@attrs.frozen
class _Step:
    loss: float
    tokens: int
    grad_norm: float
    weights: Mapping[str, Tensor]


class _Steps:
    """Takes one step after the other."""

    def __init__(self, config: RunConfig, model: GPT) -> None:
        self.config, self.model = config, model
        self.optimizer = AdamW(_trained(model), config)

    def __call__(self, samples: Sequence[Sample]) -> _Step:
        self.model.zero_grad()
        loss, tokens, _ = _forward_backward(self.config, self.model, samples)
        for router in self.model.routers():
            router.update_bias()
        norm = self.optimizer.step(dict(self._gradients()))
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return _Step(loss, tokens, norm, weights)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.optimizer.parameters.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
