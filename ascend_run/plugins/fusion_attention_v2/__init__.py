"""The second version of the NPU's fused attention, which makes biases of positions itself."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Claim,
    HookError,
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
    """Attention by ``npu_fusion_attention_v2``; elsewhere by the platform's first kernel.

    A bias of positions (ALiBi) enters as one slope a head and the positions at which queries and
    keys start, and is made inside the operator; the first version is given it as a matrix. Any
    other bias is added after the scale, and so not divided by it before.
    Numerics: exact softmax. Source: torch_npu's npu_fusion_attention_v2.
    """

    manifest = Manifest(
        name="fusion-attention-v2",
        summary="the NPU's second fused attention: biases from slopes and start positions",
        claims=(Claim.ATTENTION_KERNEL,),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.EMULATED,
            "cuda": Support.UNVERIFIED,
            NPU: Support.ARITHMETIC,
        },
        attention=AttentionFeatures.all_but(),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=("--use-fusion-attn-v2",),
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
