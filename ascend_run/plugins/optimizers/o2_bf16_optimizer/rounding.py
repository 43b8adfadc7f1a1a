"""Stochastic rounding to bfloat16 without a random generator; imports torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_GOLDEN: Final = 0x9E3779B1 - 2**32
_MURMUR: Final = 0x85EBCA6B - 2**32
"""Odd multipliers of Fibonacci hashing and of MurmurHash3, as int32."""
_LOW: Final = 0xFFFF


def key_of(step: Tensor, seed: int) -> Tensor:
    """Return the int32 key of a step, of zero dimensions and on its device."""
    offset = (seed * 0x9E3779B1) & 0xFFFFFFFF
    return step.to(torch.int32) * _MURMUR + (offset - 2**32 if offset >= 2**31 else offset)


def drawn(first: Tensor, second: Tensor, key: Tensor) -> Tensor:
    """Return integers in [0, 2^16) in int32, hashed from the bits of two float32 tensors.

    An element's number depends on its two values and the key alone: neither on its position nor on
    how the tensor is sharded. So replicas draw equal numbers, and a resumed run, in any layout,
    draws those of the uninterrupted one.
    """
    x = first.view(torch.int32) ^ key
    x.mul_(_GOLDEN)
    x.bitwise_xor_(x >> 15)
    x.add_(second.view(torch.int32))
    x.mul_(_MURMUR)
    x.bitwise_xor_(x >> 13)
    x.mul_(_GOLDEN)
    return x.bitwise_right_shift_(16).bitwise_and_(_LOW)


def round_stochastically_(values: Tensor, numbers: Tensor) -> Tensor:
    """Round float32 values to bfloat16, in place: away from zero by the probability
    ``(|x| - lower) / (upper - lower)`` between the two neighbours of |x|.

    Args:
        numbers: From ``drawn``.
    """
    values.view(torch.int32).add_(numbers).bitwise_and_(~_LOW)
    return values
