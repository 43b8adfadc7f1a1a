"""Kernel selection for the gated activation."""

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
    PlatformOps,
    RunConfig,
    SavedChange,
    Storage,
    Support,
    Wrapper,
    hookimpl,
)


class Swiglu:
    """Compute the gated activation of MLPs and experts by the selected kernel.

    Cost: no communication; a compiled kernel saves only its input for backward. Numerics: a fused
    kernel rounds a chain of multiplications once. Source: arXiv:2002.05202.
    """

    manifest = Manifest(
        name="swiglu",
        summary="choose the kernel of SwiGLU: the platform's, torch's, compiled, or Liger's",
        requires=(
            Condition(
                "model.activation",
                "==",
                "silu",
                why="the gate of SwiGLU is SiLU",
                fix="set model.activation=silu, or leave swiglu out",
            ),
        ),
        idle=Condition(
            "model.gated_linear_unit",
            "==",
            False,
            why="the MLP has no gate",
            fix="set model.gated_linear_unit=true",
        ),
        exercised_by=(
            "plugins.swiglu.kernel=auto is the platform's own kernel here; set "
            "plugins.swiglu.kernel=torch"
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
            LegacyFlag(flag="--use-fused-swiglu"),
            LegacyFlag(flag="--swiglu", key="model.gated_linear_unit"),
            LegacyFlag(flag="--swiglu", key="model.activation", values={"": "silu"}),
        ),
        source="arXiv:2002.05202",
    )
    config_class = KernelOptions

    def __init__(self, config: KernelOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return problems(self.manifest.name, self.config.kernel, config.platform)

    @hookimpl
    def ascend_cost(self, config: RunConfig) -> CostChange | None:
        if choose("swiglu", self.config.kernel, config.platform) not in ("compile", "liger"):
            return None
        computed_again = ("mlp.activated", "shared_experts.activated", "experts.activated")
        return CostChange(saved=(SavedChange(tensors=computed_again, storage=Storage.NONE),))

    @hookimpl
    def ascend_fused_operators(self, device: Device) -> Wrapper[PlatformOps]:
        kind = device.torch_device.type
        return lambda ops: replaced(ops, self.config.kernel, kind, "swiglu")
