"""The forms in which PEFT stacks the adapters of experts (``target_parameters``).

A is [E R, in] with rows e R + r; B is [out, R E] with columns r E + e. Source:
https://github.com/huggingface/peft, peft/tuners/lora/layer.py, ParamWrapper.
"""

# E experts, R rank of the adapter

from __future__ import annotations

from torch import Tensor


def a_by_expert(a: Tensor, count: int) -> Tensor:
    """Return [E, R, in] of PEFT's A; a view."""
    by_expert: Tensor = a.unflatten(0, (count, -1))
    return by_expert


def b_by_expert(b: Tensor, count: int) -> Tensor:
    """Return [E, out, R] of PEFT's B; a view."""
    by_expert: Tensor = b.unflatten(1, (-1, count)).permute(2, 0, 1)
    return by_expert


def stacked_a(a_ERK: Tensor) -> Tensor:
    """Return PEFT's A of [E, R, in]."""
    return a_ERK.flatten(0, 1)


def stacked_b(b_EMR: Tensor) -> Tensor:
    """Return PEFT's B of [E, out, R]."""
    return b_EMR.permute(1, 2, 0).flatten(1)
