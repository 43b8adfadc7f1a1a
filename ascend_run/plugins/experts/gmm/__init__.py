"""Grouped GEMM: compute all experts of a rank in one differentiable operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import attrs

from ascend_run.ops.experts.dispatcher_cost import NO_EXPERTS
from ascend_run.ops.experts.grouped_widths import row_elements
from ascend_run.plugin_api import (
    CostChange,
    Device,
    ExpertsKernel,
    Layout,
    LegacyFlag,
    Manifest,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    hookimpl,
)

from .cost import grouped_cost, is_swiglu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascend_run.ops.experts.grouped_matmul import Backend


BACKENDS = ("auto", "grouped_mm", "bmm", "loop")


@attrs.frozen(kw_only=True)
class GmmConfig:
    """Options, set by ``plugins.gmm.<field>=<value>``."""

    backend: str = attrs.field(default="auto", validator=attrs.validators.in_(BACKENDS))
    """Implementation of the grouped GEMM: ``auto`` uses the platform's operator if it has one, else
    chooses by device, dtype and token counts of each call; ``grouped_mm`` (torch's own), ``bmm``
    (padded to the fullest expert) or ``loop``."""
    gradient_accumulation_fusion: bool = False
    """Accumulate the gradients of the experts' weights directly in the buffer that is reduced, in
    its dtype, instead of in a separate tensor that is then added to it."""


class Gmm:
    """Compute the experts' MLPs as grouped GEMMs, with a hand-written backward.

    Cost: no communication; saves 3 F values per token where autograd saves 5 F. Numerics: ``loop``
    is bitwise equal to the plain loop; the others may use a different reduction order. Source:
    arXiv:2211.15841.
    """

    manifest = Manifest(
        name="gmm",
        summary="compute all experts of a rank by grouped GEMM",
        idle=NO_EXPERTS,
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        legacy_flags=(
            LegacyFlag(flag="--moe-grouped-gemm"),
            LegacyFlag(
                flag="--gemm-gradient-accumulation-fusion",
                key="plugins.gmm.gradient_accumulation_fusion",
            ),
        ),
        source="MegaBlocks, arXiv:2211.15841",
    )
    config_class = GmmConfig

    def __init__(self, config: GmmConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        if self.config.backend != "grouped_mm" or not config.model.num_moe_experts:
            return []
        row = row_elements(4 if config.train.precision == "fp32" else 2)
        model = config.model
        widths = {
            "model.hidden_size": (model.hidden_size, row),
            "model.moe_ffn_hidden_size": (
                model.moe_ffn_hidden_size or model.ffn_hidden_size,
                row * layout.expt_tp,  # which is sharded over these ranks
            ),
        }
        return [
            f"gmm: plugins.gmm.backend=grouped_mm needs {name}={width} to be a multiple of "
            f"{unit} in {config.train.precision}; use {width + -width % unit}, or "
            "plugins.gmm.backend=auto"
            for name, (width, unit) in widths.items()
            if width is not None and width % unit
        ]

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: PipelineStage) -> CostChange | None:
        if not rank.moe_layers:
            return None
        gated = bool(config.model.gated_linear_unit)
        return grouped_cost(rank, gated=gated, swiglu=is_swiglu(config.model))

    @hookimpl
    def ascend_experts(
        self, config: RunConfig, device: Device, ops: PlatformOps
    ) -> ExpertsKernel | None:
        if not config.model.num_moe_experts:
            return None
        from .kernel import GroupedExperts

        backend = cast("Backend | Literal['auto']", self.config.backend)  # one of BACKENDS
        return GroupedExperts(
            ops.grouped_matmul if backend == "auto" else backend,
            accumulate=self.config.gradient_accumulation_fusion,
            device=device.torch_device,
        )
