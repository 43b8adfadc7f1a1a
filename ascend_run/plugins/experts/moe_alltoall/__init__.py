"""All-to-all dispatcher whose collectives are waited for where their results are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.experts.chunk_limits import chunk_problems
from ascend_run.ops.experts.dispatcher_cost import (
    ALL_TO_ALL,
    in_chunks,
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


@attrs.frozen(kw_only=True)
class MoeAlltoallConfig:
    """Options, set by ``plugins.moe-alltoall.<field>=<value>``."""

    overlap_chunks: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Chunks in which the tokens of a rank's experts are exchanged, each behind the computation of
    others; at most the experts of a rank. 1 exchanges them at once."""


class MoeAlltoall:
    """Issue the all-to-alls of tokens and outputs early, and wait for them late.

    The order of the received rows is computed behind them, and shared experts with
    ``model.moe_shared_expert_overlap``, forward and backward; with ``overlap_chunks`` the experts
    themselves, too. Token counts are gathered while the tokens are permuted, and read on the host
    once. Cost: the communication of Megatron's dispatcher, in as many more calls as there are
    chunks. Numerics: a token's outputs, and the gradients of its copies, may be added in a
    different order. Source: MindSpeed's ``moe_permutation_async_comm`` and
    ``moe_alltoall_overlap_comm``.
    """

    manifest = Manifest(
        name="moe-alltoall",
        summary="overlap the all-to-alls of the token dispatcher, forward and backward",
        claims=(Claim.TOKEN_DISPATCHER,),
        requires=(ALL_TO_ALL,),
        after=("moe-permute-fusion",),  # it takes over how that permutes
        idle=Condition.one_rank("expert_model_parallel_size", why="all experts are on every rank"),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.EMULATED, "npu": Support.UNVERIFIED},
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            *(
                LegacyFlag(
                    flag="--moe-permutation-async-comm",
                    where={"--moe-token-dispatcher-type": kind},
                )
                for kind in ("alltoall", "alltoall_seq")
            ),
            LegacyFlag(flag="--moe-alltoall-overlap-comm"),
            LegacyFlag(
                flag="--moe-alltoall-overlap-comm",
                key="plugins.moe-alltoall.overlap_chunks",
                values={"": 2},
            ),
        ),
        source="MindSpeed, alltoall dispatcher optimisation",
    )
    config_class = MoeAlltoallConfig

    def __init__(self, config: MoeAlltoallConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(
        self, config: RunConfig, layout: Layout, manifests: Sequence[Manifest]
    ) -> Sequence[str]:
        experts, chunks = config.model.num_moe_experts, self.config.overlap_chunks
        if not experts or layout.ep == 1 or chunks == 1:
            return []
        links = {manifest.name: manifest.forward_links.get("experts") for manifest in manifests}
        most = experts // layout.ep, "experts of a rank"
        problems = [*chunk_problems("plugins.moe-alltoall.overlap_chunks", chunks, most, links)]
        return [f"moe-alltoall: {'; '.join(problems)}"] if problems else []

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.ep == 1:
            return None
        change = saved_indices(config, layout, rank)
        if change is None:
            return None
        chunks = self.config.overlap_chunks
        sent = overlapped(config) if chunks == 1 else in_chunks(config, layout, chunks)
        return attrs.evolve(change, communication=sent)

    @hookimpl
    def ascend_token_dispatcher(self, config: RunConfig) -> c.Wrapper[c.TokenDispatcher] | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        if (chunks := self.config.overlap_chunks) > 1:
            from ascend_run.ops.experts.chunked_dispatcher import ChunkedDispatcher

            return lambda inner: ChunkedDispatcher(inner, chunks)
        from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher

        return lambda inner: AllToAllDispatcher(inner, overlap=True)
