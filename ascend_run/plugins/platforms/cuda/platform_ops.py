"""Fused operators of the CUDA platform."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F

from ascend_run.ops.elementwise.rotary import rotary
from ascend_run.ops.elementwise.swiglu import swiglu
from ascend_run.plugin_api import PlatformOps

from . import forms
from .attention import FusedCudaAttention


def platform_ops() -> PlatformOps:
    """Return the operators: torch's norms are one kernel each way; RoPE and SwiGLU are built in.

    On a GPU the split of q, k and v is a view that the kernels read directly.
    """
    return PlatformOps(
        rms_norm=lambda x, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps),
        layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps),
        swiglu=swiglu,
        rotary=rotary,
        attention_kernels={
            "fused": FusedCudaAttention,
            "flash": partial(FusedCudaAttention, cudnn=False),
            "efficient": partial(FusedCudaAttention, flash=False),
            "blocks": partial(FusedCudaAttention, in_blocks=True),
        },
        fused=forms.fused(),
    )
