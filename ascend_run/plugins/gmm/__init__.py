"""Grouped matrix products: all experts of a rank in one differentiable operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    Claim,
    Condition,
    CostChange,
    ExpertsKernel,
    Manifest,
    Numerics,
    PlatformOps,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

from .cost import grouped_cost

if TYPE_CHECKING:
    from collections.abc import Sequence


BACKENDS = ("auto", "grouped_mm", "bmm", "loop")
ROW_BYTES = 16
"""torch's grouped product takes rows that are multiples of this; ``auto`` knows."""


@attrs.frozen(kw_only=True)
class GmmConfig:
    """Options, set by ``plugins.gmm.<field>=<value>``."""

    backend: str = attrs.field(default="auto", validator=attrs.validators.in_(BACKENDS))
    """How the products are taken: ``auto`` by the platform's own operator where it has one, else by
    device, dtype and counts of each call; ``grouped_mm`` (torch's own), ``bmm`` (padded to the
    fullest expert) or ``loop``."""
    gradient_accumulation_fusion: bool = False
    """Add the gradients of the experts' weights straight to the buffer that is reduced, in its
    dtype, rather than to a tensor of their own that is then added to it."""


class Gmm:
    """The experts' feed-forward as grouped products, with a backward by hand.

    Cost: no messages; keeps 3 F values a token where autograd keeps 5 F. Numerics: ``loop`` is the
    plain loop bit for bit, the others may sum a product in another order. Source:
    arXiv:2211.15841.
    """

    manifest = Manifest(
        name="gmm",
        summary="compute all experts of a rank by grouped matrix products",
        claims=(Claim.EXPERTS,),
        idle=Condition(
            "model.num_moe_experts",
            "<=",
            0,
            why="there are no experts",
            fix="set model.num_moe_experts",
        ),
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        legacy_flags=("--moe-grouped-gemm", "--gemm-gradient-accumulation-fusion"),
        source="MegaBlocks, arXiv:2211.15841",
    )
    config_class = GmmConfig

    def __init__(self, config: GmmConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        if self.config.backend != "grouped_mm" or not config.model.num_moe_experts:
            return []
        item = 4 if config.train.precision == "fp32" else 2
        model = config.model
        widths = {
            "model.hidden_size": model.hidden_size,
            "model.moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        }
        return [
            f"gmm: plugins.gmm.backend=grouped_mm needs {name}={width} to be a multiple of "
            f"{ROW_BYTES // item} in {config.train.precision}; use {width + -width % 16}, or "
            "plugins.gmm.backend=auto"
            for name, width in widths.items()
            if width is not None and width * item % ROW_BYTES
        ]

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: RankKind) -> CostChange | None:
        if not rank.moe_layers:
            return None
        model = config.model
        gated, is_silu = bool(model.gated_linear_unit), model.activation == "silu"
        return grouped_cost(rank, gated=gated, is_silu=is_silu)

    @hookimpl
    def ascend_experts(self, config: RunConfig, ops: PlatformOps) -> ExpertsKernel | None:
        if not config.model.num_moe_experts:
            return None
        from .kernel import GroupedExperts

        return GroupedExperts(
            ops.grouped_matmul if self.config.backend == "auto" else self.config.backend,
            accumulate=self.config.gradient_accumulation_fusion,
        )
