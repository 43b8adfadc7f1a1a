"""The kernel of the gated activation."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.ops.kernels.operator_kernels import KernelOptions, choose, problems, replaced
from ascend_run.plugin_api import (
    Condition,
    CostChange,
    Device,
    KeptChange,
    Manifest,
    Maturity,
    Numerics,
    Place,
    PlatformOps,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)


class Swiglu:
    """The gated activation of feed-forwards, those of experts too, by one fused kernel, or by the
    plain formula.

    Cost: no messages; a compiled one keeps its input alone for backward. Numerics: the products of
    a chain are rounded once where it is one kernel. Source: arXiv:2002.05202.
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
            why="the feed-forward has no gate",
            fix="set model.gated_linear_unit=true",
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=1,
        maturity=Maturity.BETA,
        legacy_flags=("--use-fused-swiglu", "--swiglu"),
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
        return CostChange(kept=(KeptChange(tensors=computed_again, place=Place.NOWHERE),))

    @hookimpl
    def ascend_fused_operators(self, device: Device) -> Wrapper[PlatformOps]:
        kind = device.torch_device.type
        return lambda ops: replaced(ops, self.config.kernel, kind, "swiglu")
