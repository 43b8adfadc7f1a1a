"""Fused operators of the NPU platform, each with its backward."""

# S sequence, B batch, N heads, D head width, R rotated width, H hidden size; of grouped matmuls
# T rows of all groups, X groups, K and N inner and outer widths of the matrices

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ascend_run.ops.autograd_function import Function
from ascend_run.ops.elementwise import swiglu as torch_form
from ascend_run.plugin_api import PlatformError, PlatformOps

from . import forms, operators
from .attention import FusedNpuAttention
from .gaps import lacking, taking


def platform_ops(release: str = "") -> PlatformOps:
    """Return the operators: torch_npu runs torch's layer norm as one kernel, and has the others.

    Args:
        release: Version of torch_npu; an operator that it lacks uses the torch implementation, or
            raises an error when it is requested.
    """
    return PlatformOps(
        rms_norm=rms_norm,
        layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        swiglu=swiglu,
        rotary=rotary,
        grouped_matmul=NpuGroups,
        attention_kernels={
            "v1": FusedNpuAttention,
            "v2": partial(_second_version, release),
            "blocks": partial(FusedNpuAttention, in_blocks=True),
        },
        fused=forms.fused(lacking(release)),
    )


def _second_version(release: str, **options: Any) -> FusedNpuAttention:
    """Return the attention kernel for version 2 of the operator.

    Raises:
        PlatformError: This release of torch_npu does not take its arguments.
    """
    name = "npu_fusion_attention_v2"
    if (problem := lacking(release).get(name)) is not None:
        raise PlatformError(
            f"platform npu: attention kernel v2 calls {name}, which {problem} in torch_npu "
            f"{release}; install torch_npu {taking(name)}, or use kernel v1"
        )
    return FusedNpuAttention(version=2, **options)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Implement PlatformOps.rms_norm."""
    out: Tensor = _RmsNorm.apply(x, weight_H, eps)
    return out


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y, inverse = operators.rms_norm(x, weight_H, eps)
        ctx.save_for_backward(x, weight_H, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H, inverse = ctx.saved_tensors
        dx, dweight = operators.rms_norm_backward(dy.contiguous(), x, weight_H, inverse)
        return dx, dweight.to(weight_H.dtype), None


def swiglu(gate_up: Tensor) -> Tensor:
    """Implement PlatformOps.swiglu.

    The operator is not called without rows, as of an empty expert: its result is not documented.
    """
    return _SwiGlu.apply(gate_up) if gate_up.numel() else torch_form.swiglu(gate_up)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return operators.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return operators.swiglu_backward(dy.contiguous(), gate_up)


def rotary(x_SBND: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool) -> Tensor:
    """Implement PlatformOps.rotary.

    Both entries of a pair have one angle, so the tables hold each angle twice.
    """
    width = cos_SR.shape[-1]
    cos, sin = (table.to(x_SBND.dtype)[:, None, None] for table in (cos_SR, sin_SR))
    rotated: Tensor = _Rotary.apply(x_SBND[..., :width], cos, sin, interleaved)
    if width == x_SBND.shape[-1]:
        return rotated
    return torch.cat((rotated, x_SBND[..., width:]), dim=-1)


class _Rotary(Function):
    """A rotation; its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return operators.rotary_mul(x.contiguous(), cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dx = operators.rotary_mul(dy.contiguous(), cos, -sin, ctx.interleaved)
        return dx, None, None, None


class NpuGroups:
    """Implement PlatformOps.grouped_matmul.

    The operator's result for groups without rows is not documented: it is not called if all groups
    are empty, and its output for an empty group is zeroed, also where the host does not know which
    groups are.
    """

    counts_on_device = True

    def __init__(self, counts: Sequence[int] | Tensor, device: torch.device) -> None:
        self.counts = counts
        if isinstance(counts, Tensor):
            self.ends_X = counts.cumsum(0)
        else:
            ends = torch.tensor([*accumulate(counts)], dtype=torch.int64)
            self.ends_X = ends.to(device, non_blocking=True)

    def matmul(self, x_TK: Tensor, matrices_XKN: Tensor) -> Tensor:
        if x_TK.shape[0] == 0:
            return x_TK.new_empty(0, matrices_XKN.shape[2])
        return operators.grouped_matmul(x_TK.contiguous(), matrices_XKN, self.ends_X)

    def outer(self, a_TN: Tensor, b_TK: Tensor) -> Tensor:
        if a_TN.shape[0] == 0:
            return a_TN.new_zeros(len(self.ends_X), a_TN.shape[1], b_TK.shape[1])
        products = operators.grouped_outer(a_TN.contiguous().t(), b_TK.contiguous(), self.ends_X)
        if isinstance(self.counts, Tensor):
            return products.masked_fill_((self.counts == 0)[:, None, None], 0.0)
        for product, count in zip(products, self.counts, strict=True):
            if count == 0:
                product.zero_()
        return products

    def add_outer(self, sum_XNK: Tensor, a_TN: Tensor, b_TK: Tensor) -> None:
        if a_TN.shape[0] == 0:
            return
        forms.groups.grouped_matmul_add_(sum_XNK, a_TN, b_TK, self.ends_X, cumulative=True)
