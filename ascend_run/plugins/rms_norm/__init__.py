"""The kernel of root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.ops.kernels.operator_kernels import KernelOptions, choose, problems, replaced
from ascend_run.plugin_api import (
    Condition,
    CostChange,
    Device,
    Manifest,
    Maturity,
    Numerics,
    PlatformOps,
    RankKind,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import plain_cost


class RmsNorm:
    """Every RMSNorm of the model by one fused kernel, or by the plain formula.

    Cost: no messages; the plain formula keeps its steps for backward. Numerics: statistics in
    float32 or wider, rounded once, whichever kernel it is; sums in its own order. Source:
    arXiv:1910.07467.
    """

    manifest = Manifest(
        name="rms-norm",
        summary="choose the kernel of RMSNorm: the platform's, torch's, compiled, or Liger's",
        idle=Condition(
            "model.normalization",
            "!=",
            "RMSNorm",
            why="the model has no RMSNorm",
            fix="set model.normalization=RMSNorm",
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=1,
        maturity=Maturity.BETA,
        legacy_flags=("--use-fused-rmsnorm", "--normalization RMSNorm"),
        source="arXiv:1910.07467",
    )
    config_class = KernelOptions

    def __init__(self, config: KernelOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return problems(self.manifest.name, self.config.kernel, config.platform)

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: RankKind) -> CostChange | None:
        """A fused kernel, compiled or not, keeps its input and one statistic a row."""
        form = choose("rms_norm", self.config.kernel, config.platform)
        plain = form == "torch" and config.model.normalization == "RMSNorm"
        return plain_cost(rank) if plain else None

    @hookimpl
    def ascend_fused_operators(self, device: Device) -> Wrapper[PlatformOps]:
        kind = device.torch_device.type
        return lambda ops: replaced(ops, self.config.kernel, kind, "rms_norm")
