"""The table of fused operators on the CPU."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F

from ascend_run.ops.elementwise.rms_norm import rms_norm
from ascend_run.ops.elementwise.rotary import rotary, split_qkv_rotary
from ascend_run.ops.elementwise.swiglu import swiglu
from ascend_run.plugin_api import PlatformOps

from .attention import FusedCpuAttention


def platform_ops() -> PlatformOps:
    """torch's own layer norm is one kernel; the others are ours."""
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
