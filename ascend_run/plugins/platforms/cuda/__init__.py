"""The NVIDIA GPU platform: nccl ranks and torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ascend_run.plugin_api import (
    AttentionFeatures,
    Manifest,
    Maturity,
    Numerics,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import AttentionKernel, Patch, PlatformOps
    from ascend_run.plugin_api.contracts import Device


class Cuda:
    """Train on NVIDIA GPUs, one rank per device."""

    manifest = Manifest(
        name="cuda",
        summary="train on NVIDIA GPUs, with nccl between the ranks",
        numerics=Numerics.ROUNDING,
        platforms={"cuda": Support.EMULATED},
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        attention=AttentionFeatures.all_but(),
        source="torch.nn.attention; FlashAttention-2, arXiv:2307.08691",
    )

    @hookimpl
    def ascend_device(self, local_rank: int) -> Device:
        from .device import CudaDevice

        return CudaDevice(local_rank)

    @hookimpl
    def ascend_patches(self) -> Sequence[Patch]:
        from ascend_run.plugins.platforms import transformer_engine_patches

        from .many_tensors import patches

        return (*transformer_engine_patches(), *patches())

    @hookimpl
    def ascend_attention_kernel(self, ops: PlatformOps) -> AttentionKernel:
        return next(iter(ops.attention_kernels.values()))()

    @hookimpl
    def ascend_platform_ops(self) -> PlatformOps:
        from .platform_ops import platform_ops

        return platform_ops()
