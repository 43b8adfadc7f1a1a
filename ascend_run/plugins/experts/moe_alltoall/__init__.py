"""All-to-all dispatcher whose collectives are waited for where their results are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.experts.dispatcher_cost import (
    ALL_TO_ALL,
    overlapped,
    saved_indices,
)
from ascend_run.plugin_api import (
    Claim,
    Condition,
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


class MoeAlltoall:
    """Issue the all-to-alls of tokens and outputs early, and wait for them late.

    The order of the received rows is computed behind them, and shared experts with
    ``model.moe_shared_expert_overlap``, forward and backward. Token counts are gathered while the
    tokens are permuted, and read on the host once. Cost: the communication of Megatron's
    dispatcher. Numerics: a token's outputs, and the gradients of its copies, may be added in a
    different order. Source: MindSpeed's ``moe_permutation_async_comm``.
    """

    manifest = Manifest(
        name="moe-alltoall",
        summary="overlap the all-to-alls of the token dispatcher, forward and backward",
        claims=(Claim.TOKEN_DISPATCHER,),
        requires=(ALL_TO_ALL,),
        idle=Condition.one_rank("expert_model_parallel_size", why="all experts are on every rank"),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.UNVERIFIED, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(LegacyFlag(flag="--moe-permutation-async-comm"),),
        source="MindSpeed, alltoall dispatcher optimisation",
    )

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.ep == 1:
            return None
        change = saved_indices(config, layout, rank)
        return change and attrs.evolve(change, communication=overlapped(config))

    @hookimpl
    def ascend_token_dispatcher(self, config: RunConfig) -> c.Wrapper[c.TokenDispatcher] | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher

        return lambda inner: AllToAllDispatcher(inner, overlap=True)
