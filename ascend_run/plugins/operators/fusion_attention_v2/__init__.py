"""Version 2 of the NPU's fused attention, which computes position biases itself."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    HookError,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PlatformOps,
    RunConfig,
    Support,
    hookimpl,
)

KERNEL: Final = "v2"
NPU: Final = "npu"


class FusionAttentionV2:
    """Compute attention with ``npu_fusion_attention_v2``; other platforms use their default kernel.

    A position bias (ALiBi) is passed as one slope per head and the start positions of queries and
    keys, and is computed inside the operator; version 1 takes it as a matrix. Any other bias is
    added after the scale, so it is not divided by the scale first. Numerics: exact softmax. Source:
    torch_npu's npu_fusion_attention_v2.
    """

    manifest = Manifest(
        name="fusion-attention-v2",
        summary="the NPU's second fused attention: biases from slopes and start positions",
        exercised_by=(
            f"verify it with --platform {NPU}: others have no kernel {KERNEL} and use their own"
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.EMULATED,
            "cuda": Support.EMULATED,
            NPU: Support.ARITHMETIC,
        },
        attention=AttentionFeatures.all_but(),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(LegacyFlag(flag="--use-fusion-attn-v2"),),
        source="torch_npu, npu_fusion_attention_v2",
    )

    def __init__(self) -> None:
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def ascend_attention_kernel(self, config: RunConfig, ops: PlatformOps) -> AttentionKernel:
        if self._kernel is None:  # one for all layers: they share its mask
            kernels = ops.attention_kernels
            if not kernels:
                raise HookError(
                    f"fusion-attention-v2: platform {config.platform} names no attention kernels "
                    "to choose from; leave the plugin out"
                )
            self._kernel = kernels.get(KERNEL, next(iter(kernels.values())))()
        return self._kernel
