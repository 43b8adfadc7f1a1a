"""Tensors of an NPU in memory of the host: torch_npu's swapped memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ascend_run.ops.memory.host_mapped import HostMapped
from ascend_run.plugins.platforms.npu.operators import swapped_memory as operators

COPIED_AT_ONCE: Final = 2**22
"""Most elements that one call copies; it needs memory of the device for twice as many."""


class SwappedMemory(HostMapped):
    """HostMapped on swapped memory, which few operators take: AdamW also copies.

    Of tensors in float32, float16 or bfloat16.
    """

    every_operator: ClassVar[bool] = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return operators.empty_with_swapped_memory(shape, dtype, self.device)

    def write(self, mapped: Tensor, values: Tensor) -> None:
        _copy(mapped, values.to(self.device))

    def read(self, mapped: Tensor) -> Tensor:
        values = torch.empty(mapped.shape, dtype=mapped.dtype, device=self.device)
        _copy(values, mapped)
        return values

    def adamw_step_(
        self,
        options: Mapping[str, Any],
        params: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
    ) -> None:
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        numbers = torch.stack(steps).tolist()  # waits for the device once
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = options["betas"]
        for parameter, grad, state, step in zip(params, grads, states, numbers, strict=True):
            operators.apply_adam_w_(
                parameter,
                state["exp_avg"],
                state["exp_avg_sq"],
                grad,
                beta1_power=beta1 ** (step - 1),
                beta2_power=beta2 ** (step - 1),
                lr=options["lr"],
                weight_decay=options["weight_decay"],
                beta1=beta1,
                beta2=beta2,
                eps=options["eps"],
            )


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy to or from swapped memory, bitwise: a first moment that decays to nothing becomes the
    gradient, ``m = 0 * m + (1 - 0) * grad``."""
    target.fill_(-0.0)  # a negative zero plus a zero of either sign is the latter
    parts = (tensor.reshape(-1).split(COPIED_AT_ONCE) for tensor in (target, source))
    for m, grad in zip(*parts, strict=True):
        var, v = torch.zeros((2, m.numel()), dtype=m.dtype, device=m.device)
        operators.apply_adam_w_(
            var,
            m,
            v,
            grad,
            beta1_power=0.0,
            beta2_power=0.0,
            lr=0.0,
            weight_decay=0.0,
            beta1=0.0,
            beta2=0.0,
            eps=1.0,
        )
