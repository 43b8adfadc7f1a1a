"""The Ascend NPU platform: hccl ranks, and torch_npu's fused operators in one module."""

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


class Npu:
    """Train on Ascend NPUs.

    Its operators are tested without a device: each call against torch_npu's schema, and the
    surrounding arithmetic with reference kernels. It has not run on a device.
    """

    manifest = Manifest(
        name="npu",
        summary="train on Ascend NPUs, with hccl between the ranks",
        numerics=Numerics.ROUNDING,
        platforms={"npu": Support.ARITHMETIC},
        level=0,
        maturity=Maturity.EXPERIMENTAL,
        attention=AttentionFeatures.all_but(),
        source="torch_npu, Ascend Extension for PyTorch",
    )

    def __init__(self) -> None:
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def ascend_device(self, local_rank: int) -> Device:
        from .device import NpuDevice

        return NpuDevice(local_rank)

    @hookimpl
    def ascend_patches(self) -> Sequence[Patch]:
        from ascend_run.plugins.platforms import transformer_engine_patches

        return transformer_engine_patches()

    @hookimpl
    def ascend_attention_kernel(self, ops: PlatformOps) -> AttentionKernel:
        if self._kernel is None:  # one kernel for all layers, which share its mask
            self._kernel = next(iter(ops.attention_kernels.values()))()
        return self._kernel

    @hookimpl
    def ascend_platform_ops(self) -> PlatformOps:
        from .gaps import installed_release
        from .platform_ops import platform_ops

        return platform_ops(installed_release())
