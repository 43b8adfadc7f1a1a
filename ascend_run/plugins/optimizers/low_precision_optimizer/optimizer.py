"""The optimizer; imports torch."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ascend_run.ops.elementwise.adamw import adamw_, adamw_step_, new_states

from .parameters import BLOCK, CHUNK, DEVICE_CHUNK, EIGHT_BITS, MOMENTS, WIDE
from .quantization import Quantizer

_NAMES: Final = ("exp_avg", "exp_avg_sq")


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused kernel on dequantized moments, chunk by chunk.

    Between ``expand_states`` and the next step the moments are in float32, under AdamW's names. A
    parameter without gradient has no step.

    Args:
        params: float32. The option ``moments`` of a group is ``8bit`` or ``float32``.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, MOMENTS: WIDE})
        self._quantizers: dict[torch.device, tuple[Quantizer, Quantizer]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step; there is no closure."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group[MOMENTS] == EIGHT_BITS:
                for parameter in group["params"]:
                    if "exp_avg" in self.state.get(parameter, {}):
                        self._quantize(parameter)
                for parameter in params:
                    self._step(group, parameter, parameter.grad)
            elif params:
                adamw_step_(group, params, [self._wide_state(p) for p in params])

    @torch.no_grad()
    def expand_states(self) -> None:
        """Dequantize all moments, to the host: what a checkpoint holds, and AdamW's too."""
        for state in self.state.values():
            if (held := state.get(f"{_NAMES[0]}_codes")) is None:
                continue
            for name, quantizer in zip(_NAMES, self._quantizers_of(held), strict=True):
                codes, scales = state.pop(f"{name}_codes"), state.pop(f"{name}_scales")
                wide = torch.empty(codes.shape, dtype=torch.float32)
                for target, *of_chunk in _chunks(wide, codes, scales):
                    target.copy_(quantizer.dequantized(*of_chunk))
                state[name] = wide

    def _quantize(self, parameter: Tensor) -> None:
        """Quantize the expanded moments of a parameter."""
        state = self.state[parameter]
        for name, quantizer in zip(_NAMES, self._quantizers_of(parameter), strict=True):
            wide = state.pop(name)
            state[f"{name}_codes"], state[f"{name}_scales"] = _empty(parameter)
            codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
            for source, *of_chunk in _chunks(wide, codes, scales):
                _store(quantizer, source.to(parameter.device), *of_chunk)

    def _step(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self._narrow_state(parameter)
        step = state["step"].add_(1)
        moments = [state[f"{name}_{kind}"] for name in _NAMES for kind in ("codes", "scales")]
        first, second = self._quantizers_of(parameter)
        for p, g, *held in _chunks(parameter, grad.reshape(-1), *moments):
            wide_first, wide_second = first.dequantized(*held[:2]), second.dequantized(*held[2:])
            adamw_(group, [p], [g], [wide_first], [wide_second], [step])
            _store(first, wide_first, *held[:2])
            _store(second, wide_second, *held[2:])

    def _wide_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state |= new_states(parameter)
        return state

    def _narrow_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in _NAMES:
                codes, scales = _empty(parameter)
                state[f"{name}_codes"], state[f"{name}_scales"] = codes.zero_(), scales.zero_()
        return state

    def _quantizers_of(self, parameter: Tensor) -> tuple[Quantizer, Quantizer]:
        """Return those of the first moment and of the second, which is not negative."""
        device = parameter.device
        if device not in self._quantizers:
            self._quantizers[device] = (
                Quantizer(signed=True, device=device),
                Quantizer(signed=False, device=device),
            )
        return self._quantizers[device]


def _empty(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes and scales."""
    num_blocks = -(-parameter.numel() // BLOCK)
    return torch.empty_like(parameter, dtype=torch.uint8), parameter.new_empty(num_blocks)


def _chunks(*tensors: Tensor) -> Any:
    """Yield flat views of the same chunk of each tensor, of elements or of scales."""
    numel = tensors[0].numel()
    chunk = CHUNK if tensors[-1].device.type == "cpu" else DEVICE_CHUNK
    sizes = [chunk if t.numel() == numel else chunk // BLOCK for t in tensors]
    flat = (t.view(-1).split(size) for t, size in zip(tensors, sizes, strict=True))
    return zip(*flat, strict=True)


def _store(quantizer: Quantizer, wide: Tensor, codes: Tensor, scales: Tensor) -> None:
    for target, value in zip((codes, scales), quantizer.quantized(wide), strict=True):
        target.copy_(value)
