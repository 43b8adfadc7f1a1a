"""Tensors in memory of the host, as documented: few operators take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TAKING = ("aten::fill_", "aten::zero_", "npu::npu_apply_adam_w")
"""The operators in the documentation of ``empty_with_swapped_memory``, without those for
compression."""
NO_OPERATORS = ("aten::view", "aten::split", "aten::detach", "aten::alias")
"""Of torch, which make another tensor of the same memory; the device does nothing."""


class Swapped(Tensor):
    """A tensor that refuses what the NPU's memory of the host does not take."""

    values: Tensor
    """Its memory."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Swapped:
        made: Swapped = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device, strides=values.stride()
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        assert name in TAKING + NO_OPERATORS, f"{name} does not take memory of the host"
        named = {key: _each(values_of, value) for key, value in (kwargs or {}).items()}
        result = func(*_each(values_of, args), **named)
        if name in NO_OPERATORS:
            return _each(Swapped, result)
        return [*named["out"]] if "out" in named else args[0]


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of any tensor."""
    return tensor.values if isinstance(tensor, Swapped) else tensor


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_each(change, v) for v in value] if isinstance(value, (list, tuple)) else value


def empty_with_swapped_memory(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Return NaN, as memory may hold."""
    assert device is not None, "torch_npu expects an NPU"
    return Swapped(torch.full(tuple(size), torch.nan, dtype=dtype, device=device))


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[Tensor],
) -> list[Tensor]:
    assert not amsgrad
    assert max_grad_norm is None
    var, m, v = out
    assert 1 <= grad.dim() <= 8
    for tensor in out:
        assert (tensor.shape, tensor.dtype) == (grad.shape, grad.dtype)
    gradient = grad.double() * (-1 if maximize else 1)
    first = beta1 * m.double() + (1 - beta1) * gradient
    second = beta2 * v.double() + (1 - beta2) * gradient * gradient
    mean = first / (1 - beta1_power * beta1)
    denominator = (second / (1 - beta2_power * beta2)).sqrt() + epsilon
    weight = var.double()
    var.copy_(weight - lr / denominator * mean - lr * weight_decay * weight)
    m.copy_(first)
    v.copy_(second)
    return [var, m, v]
