"""Linear, norm and MLP."""

# shapes: see the package

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_run.types.config import FieldSection

if TYPE_CHECKING:
    from .adapters import Adapter

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class Linear(nn.Module):
    """``y = W x + b``, plus the output of an adapter.

    Args:
        bias: Whether there is a bias.
        adds_bias: Whether it is added here. Megatron adds those of ``linear_proj``, ``linear_fc1``
            and ``linear_fc2`` outside of the linear; so does the oracle, to compare outputs.
    """

    def __init__(
        self, width: int, rows: int, *, bias: bool = False, adds_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.adds_bias = adds_bias
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t() if self.adapter is None else self.adapter.output(self.weight, x)
        return y + self.bias if self.adds_bias and self.bias is not None else y


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x + bias``."""
    return x if bias is None else x + bias


class Norm(nn.Module):
    """RMSNorm, ``g x / rms(x)``, or LayerNorm, ``g (x - mean) / std(x) + b``.

    A zero-centered weight is ``g - 1``. Source: arXiv:1910.07467, arXiv:1607.06450.
    """

    def __init__(self, model: FieldSection, width: int, epsilon: float | None = None) -> None:
        super().__init__()
        is_layer_norm = model.normalization == "LayerNorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if is_layer_norm else None
        self.epsilon = model.layernorm_epsilon if epsilon is None else epsilon
        self.zero_centered = model.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            x = x - x.mean(dim=-1, keepdim=True)
        gain = 1 + self.weight if self.zero_centered else self.weight
        return plus_bias(gain * unit_rms(x, self.epsilon), self.bias)


def unit_rms(x: Tensor, epsilon: float) -> Tensor:
    """Divide by the root mean square over the last axis."""
    out: Tensor = x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    return out


class Activation:
    """``act(x)``; gated, ``act(gate) * (up + offset)`` of both halves of x.

    The gate is clamped from above, up from both sides, if there is a clamp.

    Sources: arXiv:2002.05202; clamp and offset, the published code of gpt-oss.
    """

    def __init__(self, model: FieldSection) -> None:
        self.function = ACTIVATIONS.get(model.activation)
        self.is_gated, self.alpha = bool(model.gated_linear_unit), model.quick_gelu_alpha
        self.clamp, self.offset = model.activation_func_clamp_value, model.glu_linear_offset

    def rows(self, width: int) -> int:
        """Return how many rows give an output of this width."""
        return 2 * width if self.is_gated else width

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self._activated(x)
        gate, up = x.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        out: Tensor = self._activated(gate) * (up + self.offset)
        return out

    def _activated(self, x: Tensor) -> Tensor:
        if self.function is None:  # quick_gelu, arXiv:1606.08415, section 2
            return x * torch.sigmoid(self.alpha * x)
        return self.function(x)


class MLP(nn.Module):
    """``W2 act(W1 x)``; ``linear_fc1`` holds the rows of the gate, then those of up.

    Args:
        width: F.
    """

    def __init__(self, model: FieldSection, width: int) -> None:
        super().__init__()
        bias = model.add_bias_linear if model.add_mlp_bias is None else model.add_mlp_bias
        self.activation = Activation(model)
        self.linear_fc1 = Linear(model.hidden_size, self.activation.rows(width), bias=bias)
        self.linear_fc2 = Linear(width, model.hidden_size, bias=bias)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the output, which the layer adds."""
        return self.linear_fc2.bias

    def forward(self, x: Tensor) -> Tensor:
        inner = plus_bias(self.linear_fc1(x), self.linear_fc1.bias)
        out: Tensor = self.linear_fc2(self.activation(inner))
        return out


def ffn_width(model: FieldSection) -> int:
    """Return F; four times H by default, as in arXiv:1706.03762."""
    return int(model.ffn_hidden_size or 4 * model.hidden_size)
