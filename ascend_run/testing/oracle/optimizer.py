"""AdamW with decoupled weight decay, clipping by the global norm, the schedule.

Sources: arXiv:1711.05101, algorithm 2; clipping, arXiv:1211.5063; warm-up and cosine,
arXiv:1608.03983; WSD, arXiv:2404.06395. The shapes of WSD's decay are Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ascend_run.types.config import OptimizerSection, RunConfig


def weight_decay(name: str, parameter: Tensor, options: OptimizerSection) -> float:
    """Return the weight decay of a parameter: matrices decay; vectors (norms, biases, sinks) do
    not, nor do the experts' biases, which are stacked."""
    decays = parameter.ndim > 1 and not name.endswith("bias")
    return options.weight_decay if decays else 0.0


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0; all parameters have the same."""
    options = config.optimizer
    most, least = options.lr, options.min_lr
    warmup = options.lr_warmup_iters
    end = max(1, options.lr_decay_iters or config.train.train_iters)
    if warmup > 0 and step <= warmup:
        return most * step / warmup
    if options.lr_decay_style == "constant":
        return most
    if step > end:
        return least
    if options.lr_decay_style == "WSD":
        span = options.lr_wsd_decay_iters or 0
        begin = end - span
        if step <= begin:
            return most
        share = _wsd_share(options.lr_wsd_decay_style, (step - begin) / span)
        return least + (most - least) * share
    passed = (step - warmup) / (end - warmup)
    linear = options.lr_decay_style == "linear"
    share = 1 - passed if linear else (1 + math.cos(math.pi * passed)) / 2
    return least + (most - least) * share


def _wsd_share(style: str, passed: float) -> float:
    if style == "linear":
        return 1 - passed
    if style == "cosine":
        return (1 + math.cos(math.pi * passed)) / 2
    return 2 * 0.5**passed - 1 if style == "exponential" else 1 - math.sqrt(passed)


class AdamW:
    """The optimizer's state, and its step.

    Args:
        parameters: What trains, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: RunConfig) -> None:
        self.parameters, self.config = parameters, config
        self.steps = 0
        self.weight_decays = {
            name: weight_decay(name, p, config.optimizer) for name, p in parameters.items()
        }
        self.mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.square = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Update the parameters by their gradients, which are 0 where there is none.

        Returns:
            The learning rate, and the norm of the gradients before clipping.
        """
        options, rate = self.config.optimizer, learning_rate(self.config, self.steps)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.parameters.items()
        }
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        clipped = min(1.0, options.clip_grad / (norm + 1e-6)) if options.clip_grad else 1.0
        self.steps += 1
        for name, parameter in self.parameters.items():
            update = self.update(name, clipped * gradients[name])
            decay = self.weight_decays[name] * parameter
            parameter.copy_(parameter - rate * self.rate_of(name) * (update + decay))
        return rate, norm

    def rate_of(self, name: str) -> float:
        """Return the learning rate of a parameter, divided by the schedule's."""
        return 1.0

    def update(self, name: str, gradient: Tensor) -> Tensor:
        """Return what is subtracted from a parameter, divided by its learning rate."""
        options, mean, square = self.config.optimizer, self.mean[name], self.square[name]
        beta1, beta2 = options.adam_beta1, options.adam_beta2
        mean.copy_(beta1 * mean + (1 - beta1) * gradient)
        square.copy_(beta2 * square + (1 - beta2) * gradient.square())
        unbiased = mean / (1 - beta1**self.steps)
        size = (square / (1 - beta2**self.steps)).sqrt() + options.adam_eps
        return unbiased / size
