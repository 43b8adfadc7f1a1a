"""Steps over all gradients or parameters at once, with torch's foreach kernels.

Without Transformer Engine and Apex, Megatron launches a kernel per tensor, and reads the norm of
every gradient back to the host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ascend_run.plugin_api import Patch
from ascend_run.plugins.platforms import CHECKED_VERSIONS

_OPTIMIZER: Final = "megatron.core.optimizer.optimizer"
AT_ONCE: Final = 16
"""Gradients that exist in both dtypes at once."""


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors, as float32 with one element, on their device."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms).float()).reshape(1), None


def copy_each(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy ``this`` into ``that``, whatever their dtypes."""
    if overflow_buf is not None:
        overflow_buf.fill_(0)
    if that:
        torch._foreach_copy_(that, this)


def copy_gradients_to_main(optimizer: Any) -> None:
    """Give the main parameters float32 gradients, and free those of the model group by group."""
    pairs = [
        pair
        for models, mains in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        )
        for pair in zip(models, mains, strict=True)
    ]
    for first in range(0, len(pairs), AT_ONCE):
        _widen(pairs[first : first + AT_ONCE])
    for parameters in optimizer.fp32_from_fp32_groups:
        for parameter in parameters:
            parameter.grad = parameter.main_grad


def _widen(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Do so for pairs of a model's parameter and its main parameter."""
    narrow, wide = [], []
    for model, main in pairs:
        gradient = getattr(model, "main_grad", model.grad)
        if gradient is None:
            continue
        if gradient.dtype == torch.float32:
            main.grad = gradient
        else:
            main.grad = torch.empty_like(gradient, dtype=torch.float32)
            narrow.append(gradient)
            wide.append(main.grad)
    copy_each(narrow, wide)
    for model, _ in pairs:
        model.grad = None


def patches() -> tuple[Patch, ...]:
    """Return the patches; none if Megatron finds Transformer Engine's or Apex's kernels."""
    if importlib.util.find_spec("transformer_engine") or importlib.util.find_spec("amp_C"):
        return ()
    rows = (
        ("megatron.core.optimizer.clip_grads:l2_norm_impl", l2_norm, "01526c55444a73bd"),
        (f"{_OPTIMIZER}:_multi_tensor_copy_this_to_that", copy_each, "2788b0572db3ae06"),
        (
            f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
            copy_gradients_to_main,
            "62f27803e9dae4c8",
        ),
    )
    return tuple(
        Patch(
            target=target,
            replacement=replacement,
            why="a kernel, and for norms a read by the host, per tensor",
            versions=CHECKED_VERSIONS,
            source_hash=(source_hash,),
            until="Megatron falls back to torch's foreach operations",
            group="foreach kernels",
        )
        for target, replacement, source_hash in rows
    )
