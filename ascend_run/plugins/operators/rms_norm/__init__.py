"""Kernel selection for RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.ops.kernels.operator_kernels import KernelOptions, choose, problems, replaced
from ascend_run.plugin_api import (
    Condition,
    CostChange,
    Device,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import plain_cost


class RmsNorm:
    """Compute every RMSNorm of the model with one fused kernel, or with the plain formula.

    Cost: no communication; the plain formula saves its intermediates for backward. Numerics:
    statistics in float32 or wider, rounded once, in every kernel; the reduction order differs
    between kernels. Source: arXiv:1910.07467.
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
        exercised_by=(
            "plugins.rms-norm.kernel=auto is the platform's own kernel here; set "
            "plugins.rms-norm.kernel=torch"
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=1,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--use-fused-rmsnorm"),
            LegacyFlag(flag="--normalization", key="model.normalization", values=None),
        ),
        source="arXiv:1910.07467",
    )
    config_class = KernelOptions

    def __init__(self, config: KernelOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return problems(self.manifest.name, self.config.kernel, config.platform)

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: PipelineStage) -> CostChange | None:
        """Return the cost of the plain formula.

        A fused or compiled kernel saves its input and one statistic per row.
        """
        form = choose("rms_norm", self.config.kernel, config.platform)
        plain = form == "torch" and config.model.normalization == "RMSNorm"
        return plain_cost(config, rank) if plain else None

    @hookimpl
    def ascend_fused_operators(self, device: Device) -> Wrapper[PlatformOps]:
        kind = device.torch_device.type
        return lambda ops: replaced(ops, self.config.kernel, kind, "rms_norm")
