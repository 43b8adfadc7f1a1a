"""All-gather dispatcher that gathers each token's own experts, and finds its rows meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_run.ops.experts.dispatcher_cost import ALL_GATHER, NO_EXPERTS, gathered, not_padded
from ascend_run.plugin_api import (
    Claim,
    CostChange,
    Layout,
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


class MoeAllgather:
    """Gather the experts, weights and hidden states of all tokens, in this order and all at once.

    The rows of a rank's experts are found and counted while the hidden states arrive. Rows are
    copied and summed by gathers in both directions. Cost: the choices and weights of K experts of
    a token are gathered instead of those of all. Numerics: a token's outputs may be added in a
    different order. Source: MindSpeed's ``moe_permutation_async_comm``.
    """

    manifest = Manifest(
        name="moe-allgather",
        summary="gather a token's own experts alone, and sort while the tokens arrive",
        claims=(Claim.TOKEN_DISPATCHER,),
        requires=(
            ALL_GATHER,
            not_padded("it gathers the experts that a token selected, and padding adds others"),
        ),
        conflicts={
            "moe-permute-fusion": "that permutes for the all-to-all dispatcher; enable one of them"
        },
        idle=NO_EXPERTS,
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.EMULATED, "npu": Support.UNVERIFIED},
        small_model_settings={"model.moe_token_dispatcher_type": "allgather"},
        level=2,
        maturity=Maturity.BETA,
        source="MindSpeed, allgather dispatcher optimisation",
    )

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        return gathered(config, layout, rank)

    @hookimpl
    def ascend_token_dispatcher(self) -> c.Wrapper[c.TokenDispatcher]:
        from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher

        return lambda inner: AllGatherDispatcher(inner)
