"""The average, which is saved with a run; imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """An exponential average over the steps; each rank has one of its own."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def add(self, chunks: Sequence[nn.Module]) -> None:
        """Add the weights after a step."""
        weights = [parameter.double() for chunk in chunks for parameter in chunk.parameters()]
        squares = torch.stack([weight.square().sum() for weight in weights]).sum()
        size = (squares / sum(weight.numel() for weight in weights)).sqrt()
        self.value = self.decay * self.value + (1 - self.decay) * size

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"].clone()
