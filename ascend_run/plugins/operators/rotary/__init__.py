"""Kernel selection for rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.ops.kernels.operator_kernels import KernelOptions, problems, replaced
from ascend_run.plugin_api import (
    Condition,
    Device,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PlatformOps,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)


class Rotary:
    """Rotate queries and keys, and split the projection, by the selected kernel.

    Cost: no communication. Numerics: a multiply and an add, rounded once or twice. Source:
    arXiv:2104.09864.
    """

    manifest = Manifest(
        name="rotary",
        summary="choose the kernel of rotary embedding: the platform's, torch's, compiled, Liger's",
        idle=Condition(
            "model.position_embedding_type",
            "!=",
            "rope",
            why="the model has no rotary positions",
            fix="set model.position_embedding_type=rope",
        ),
        exercised_by=(
            "plugins.rotary.kernel=auto is the platform's own kernel here; set "
            "plugins.rotary.kernel=torch"
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=1,
        maturity=Maturity.BETA,
        legacy_flags=(LegacyFlag(flag="--use-fused-rotary-pos-emb"),),
        source="arXiv:2104.09864",
    )
    config_class = KernelOptions

    def __init__(self, config: KernelOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return problems(self.manifest.name, self.config.kernel, config.platform)

    @hookimpl
    def ascend_fused_operators(self, device: Device) -> Wrapper[PlatformOps]:
        kind = device.torch_device.type
        return lambda ops: replaced(ops, self.config.kernel, kind, "rotary", "split_qkv_rotary")
