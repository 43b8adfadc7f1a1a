"""Activations at an offset of their storage, which plugins that keep saved tensors must restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

_SUBLAYERS: Final = ("self_attention", "mlp")
_ALIGNMENT: Final = 64
"""Of torch's CPU allocator, so that kernels take the same path. Unit: bytes."""


def put_at_offsets(chunks: Sequence[nn.Module], note: Callable[[], None]) -> None:
    """Let sublayers save inputs that do not begin at the start of their storage.

    In a model of a few plain layers every saved tensor does, and an offset that is lost is never
    found. In layers with an odd index, as for ``set_probe_weights``, the input of the attention
    block and of the MLP block is copied behind some padding. Values and gradients keep their bits.

    Args:
        note: Called for each such input, except in compiled code.
    """
    for chunk in chunks:
        for layer in chunk.modules():
            number = getattr(layer, "layer_number", None)
            if not isinstance(number, int) or number % 2:  # it counts from 1
                continue
            for name in _SUBLAYERS:
                if isinstance(sublayer := getattr(layer, name, None), nn.Module):
                    sublayer.register_forward_pre_hook(partial(_moved, note))


def _moved(note: Callable[[], None], module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    if not given or not isinstance(given[0], Tensor):
        return given
    if not torch.compiler.is_compiling():  # a count would be a guard that fails in every call
        note()
    return (_at_offset(given[0]), *given[1:])


def _at_offset(x: Tensor) -> Tensor:
    padding = x.new_zeros(_ALIGNMENT // x.element_size())
    return torch.cat((padding, x.flatten()))[padding.numel() :].view(x.shape)
