"""Flash attention: choose among the platform's attention kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from ascend_run.ops.attention.score_blocks import block_cost, needs_blocks
from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    ConfigError,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    Phase,
    PipelineStage,
    PlatformOps,
    RunConfig,
    SavedChange,
    SavedTensor,
    Storage,
    Support,
    WorkingMemory,
    hookimpl,
)

KERNELS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("fused", "blocks"),
    "cuda": ("fused", "flash", "efficient", "blocks"),
    "npu": ("v1", "v2", "blocks"),
}
"""Platform -> names of its kernels, its default first."""


@attrs.frozen(kw_only=True)
class FlashAttentionConfig:
    """Options, set by ``plugins.flash-attention.<field>=<value>``."""

    kernel: str = "auto"
    """Which kernel: ``fused`` on cpu; ``fused`` (cuDNN's where it is faster), ``flash`` or
    ``efficient`` on cuda; ``v1`` or ``v2`` on npu; ``blocks`` (exact blocks of torch operations)
    everywhere; ``auto`` is the platform's default."""
    layout: Literal["auto", "SBH", "BSH", "BSND", "BNSD"] = "auto"
    """Layout of q, k and v in a call of the NPU's operator; ``auto`` is SBH, which needs no
    transpose."""


class FlashAttention:
    """Select the platform's attention kernel by name; unsupported cases run in exact blocks.

    Without the plugin, the platform uses its default kernel. Cost: no communication; ``blocks``
    holds one block of scores temporarily. Numerics: exact softmax in every kernel; the reduction
    order differs. Source: arXiv:2205.14135, arXiv:2307.08691.
    """

    manifest = Manifest(
        name="flash-attention",
        summary="choose the platform's attention kernel and its memory layout",
        exercised_by=(
            "plugins.flash-attention.kernel=auto is the platform's default kernel; set "
            "plugins.flash-attention.kernel=blocks"
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        attention=AttentionFeatures.all_but(),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--use-flash-attn"),
            LegacyFlag(flag="--shape-order", key="plugins.flash-attention.layout", values=None),
        ),
        source="FlashAttention, arXiv:2205.14135; FlashAttention-2, arXiv:2307.08691",
    )
    config_class = FlashAttentionConfig

    def __init__(self, config: FlashAttentionConfig) -> None:
        self.config = config
        self._kernel: AttentionKernel | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        """Check the options against the built-in platforms.

        The kernels of a third-party platform are known, and checked, once it is loaded.
        """
        kernel, layout, platform = self.config.kernel, self.config.layout, config.platform
        problems = []
        names = KERNELS.get(platform)
        if names and kernel not in ("auto", *names):
            problems.append(_unknown(kernel, platform, names))
        if names and layout != "auto" and (platform != "npu" or kernel == "blocks"):
            problems.append(
                f"flash-attention: plugins.flash-attention.layout={layout} is for the NPU's "
                "operator; leave it out"
            )
        return problems

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the cost of materialized scores, unless the CPU platform already reports it."""
        if self.config.kernel != "blocks" or (
            config.platform == "cpu" and needs_blocks(rank.attention_needs)
        ):
            return None
        part, cost = "self_attention", block_cost(config, layout.cp, rank)
        return CostChange(
            working=(
                WorkingMemory(
                    part=f"{part}.core",
                    name="scores",
                    nbytes=cost.scores_bytes,
                    phase=Phase.BACKWARD,
                ),
            ),
            # Whether or not the platform's own kernel copies its output.
            saved=(SavedChange(tensors=(f"{part}.attended",), storage=Storage.NONE),),
            saved_added=(SavedTensor(part=part, name="copied", nbytes=cost.output_bytes),),
            flops=cost.flops,
        )

    @hookimpl
    def ascend_attention_kernel(self, config: RunConfig, ops: PlatformOps) -> AttentionKernel:
        if self._kernel is None:  # one for all layers: they share its masks
            names, wanted = tuple(ops.attention_kernels), self.config.kernel
            if not names or wanted not in ("auto", *names):
                raise ConfigError(_unknown(wanted, config.platform, names))
            build = ops.attention_kernels[names[0] if wanted == "auto" else wanted]
            layout = self.config.layout
            self._kernel = build() if layout == "auto" else build(layout=layout)
        return self._kernel


def _unknown(kernel: str, platform: str, names: Sequence[str]) -> str:
    if not names:
        return (
            f"flash-attention: platform {platform} names no attention kernels to choose from; "
            "leave the plugin out"
        )
    return (
        f"flash-attention: plugins.flash-attention.kernel={kernel}: platform {platform} has "
        f"{', '.join(names)}; choose one of them, or auto"
    )
