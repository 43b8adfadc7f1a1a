"""Fused permutation: tokens are sorted by expert and summed back by gathers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.experts.dispatcher_cost import ALL_TO_ALL, NO_EXPERTS, saved_indices
from ascend_run.plugin_api import (
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c


class MoePermuteFusion:
    """Permute and unpermute the tokens of the all-to-all dispatcher in one gather each.

    A sum reads each token's rows where they are, and the backward of both directions is the other
    one, so that nothing is added with atomic operations. Cost: no communication. Numerics: a
    token's outputs may be added in a different order. Source: Megatron-LM's
    ``moe_permute_fusion``, whose kernels are those of Transformer Engine.
    """

    manifest = Manifest(
        name="moe-permute-fusion",
        summary="sort tokens by expert, and sum them back, by gathers in both directions",
        requires=(ALL_TO_ALL,),
        idle=NO_EXPERTS,
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(LegacyFlag(flag="--moe-permute-fusion"),),
        source="Megatron-LM, megatron/core/transformer/moe/moe_utils.py",
    )

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        return saved_indices(config, layout, rank, fused=True)

    @hookimpl
    def ascend_token_dispatcher(self) -> c.Wrapper[c.TokenDispatcher]:
        from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher

        return lambda inner: AllToAllDispatcher(inner, fused=True)
