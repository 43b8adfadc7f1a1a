"""Fused operators of the CPU platform."""

from __future__ import annotations

from functools import partial

import attrs
from torch.nn import functional as F

from ascend_run.ops.elementwise.rms_norm import rms_norm
from ascend_run.ops.elementwise.rotary import rotary, split_qkv_rotary
from ascend_run.ops.elementwise.swiglu import swiglu
from ascend_run.ops.experts.grouped_matmul import MakeGroups, WideGroups
from ascend_run.ops.experts.rounded_groups import RoundedGroups
from ascend_run.ops.linear.collective_matmul import RingMatmuls
from ascend_run.ops.linear.onednn_matmul import onednn_matmul
from ascend_run.ops.linear.wide_matmul import Matmul, wide_matmul
from ascend_run.plugin_api import PlatformOps

from .attention import FusedCpuAttention


def platform_ops() -> PlatformOps:
    """Return the operators: torch's own layer norm is one kernel; the others are built in."""
    return PlatformOps(
        rms_norm=rms_norm,
        layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        swiglu=swiglu,
        rotary=rotary,
        split_qkv_rotary=split_qkv_rotary,
        attention_kernels={
            "fused": FusedCpuAttention,
            "blocks": partial(FusedCpuAttention, in_blocks=True),
        },
    )


def with_wide_attention(ops: PlatformOps) -> PlatformOps:
    """Return the same operators, with the backward of bfloat16 attention computed in float32."""
    kernels = {
        name: partial(kernel, wide_backward=True) for name, kernel in ops.attention_kernels.items()
    }
    return attrs.evolve(ops, attention_kernels=kernels)


def with_wide_matmuls(ops: PlatformOps) -> PlatformOps:
    """Return the same operators, with bfloat16 matmuls computed in float32."""
    return _with_matmuls(ops, wide_matmul, WideGroups)


def with_onednn_matmuls(ops: PlatformOps) -> PlatformOps:
    """Return the same operators, with float32 matmuls computed by oneDNN."""
    return _with_matmuls(ops, onednn_matmul, RoundedGroups)


def _with_matmuls(ops: PlatformOps, matmul: Matmul, groups: MakeGroups) -> PlatformOps:
    ring = RingMatmuls(matmul)
    forms = (ring.all_gather_matmul, ring.matmul_reduce_scatter, ring.matmul_all_reduce)
    fused = {form.__name__: form for form in forms}
    return attrs.evolve(ops, matmul=matmul, grouped_matmul=groups, fused={**ops.fused, **fused})
