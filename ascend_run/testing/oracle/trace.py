"""Moments of the inputs and outputs of every module, in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from .batches import MicroBatch

ROOT: Final = "model"
"""Name of the model itself among its modules."""

Rows = dict[str, dict[int, list[float]]]
"""``module|in or out|which tensor`` -> index of the micro-batch -> number of elements, and sums of
the elements, their squares, cubes, absolute values and cubed absolute values."""


@attrs.define
class Trace:
    """What the modules of one global batch took and gave; keys in the order of execution."""

    forward: Rows = attrs.field(factory=dict)
    backward: Rows = attrs.field(factory=dict)
    """Of the gradients of the same tensors; of the sum of the losses, not of its mean."""
    micro_batch: int = 0
    """Index of the micro-batch that runs."""

    def see(self, key: str, x: Tensor) -> None:
        """Note a tensor, and its gradient once backward has it."""
        self._add(self.forward, key, x)
        if x.requires_grad:
            x.register_hook(partial(self._see_gradient, key))

    def see_batch(self, micro_batch: int, batch: MicroBatch) -> None:
        """Note the model's inputs; times the positions too, since moments ignore the order."""
        self.micro_batch = micro_batch
        fields = {
            "input_ids": batch.tokens_BS,
            "labels": batch.labels_BS,
            "loss_mask": batch.loss_mask_BS,
        }
        self.see(f"{ROOT}|in|position_ids", batch.positions_BS)
        for name, x_BS in fields.items():
            self.see(f"{ROOT}|in|{name}", x_BS)
            self.see(f"{ROOT}|in|{name} by position", x_BS * (batch.positions_BS + 1))

    def _see_gradient(self, key: str, gradient: Tensor) -> None:
        self._add(self.backward, key, gradient)

    def _add(self, rows: Rows, key: str, x: Tensor) -> None:
        """Add the moments to those of earlier calls of the module in this micro-batch."""
        row, of_key = _moments(x), rows.setdefault(key, {})
        known = of_key.get(self.micro_batch, [0.0] * len(row))
        of_key[self.micro_batch] = [a + b for a, b in zip(known, row, strict=True)]


@torch.no_grad()
def _moments(x: Tensor) -> list[float]:
    x = x.detach().flatten().double()
    size = x.abs()
    sums = torch.stack([power.sum() for power in (x, x**2, x**3, size, size**3)])
    return [float(x.numel()), *sums.tolist()]


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Note what every module of a model takes and gives while the context is open."""
    trace = Trace()

    def see(name: str, module: nn.Module, args: Any, output: Any) -> None:
        for kind, given in (("in", args), ("out", output)):
            found = given if isinstance(given, tuple) else (given,)
            tensors = [x for x in found if isinstance(x, Tensor)]
            for index, x in enumerate(tensors):
                trace.see(f"{name}|{kind}|{index}", x)

    handles = [
        module.register_forward_hook(partial(see, name or ROOT))
        for name, module in model.named_modules()
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
