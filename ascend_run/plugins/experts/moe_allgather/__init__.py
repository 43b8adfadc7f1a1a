"""All-gather dispatcher that gathers each token's own experts, and finds its rows meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.ops.experts.chunk_limits import chunk_problems
from ascend_run.ops.experts.dispatcher_cost import (
    ALL_GATHER,
    NO_EXPERTS,
    gathered,
    gathered_in_chunks,
    not_padded,
)
from ascend_run.plugin_api import (
    Claim,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    Maturity,
    ModuleWrapper,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher
    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class MoeAllgatherConfig:
    """Options, set by ``plugins.moe-allgather.<field>=<value>``."""

    overlap_chunks: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Chunks in which the tokens of each rank are gathered and their outputs reduce-scattered, each
    behind the computation of others; at most the tokens of a rank. 1 exchanges them at once."""
    overlap_shared_experts: bool = False
    """Compute shared experts behind the reduce-scatter of the outputs."""


class MoeAllgather:
    """Gather the experts, weights and hidden states of all tokens, in this order and all at once.

    The rows of a rank's experts are found and counted while the hidden states arrive. Rows are
    copied and summed by gathers in both directions. With ``overlap_chunks`` the experts are
    computed behind the exchange of other tokens, and with ``overlap_shared_experts`` the shared
    ones behind that of the outputs, forward and backward. Cost: the choices and weights of K
    experts of a token are gathered instead of those of all. Numerics: a token's outputs, and the
    gradients of weights, may be added in a different order. Source: MindSpeed's
    ``moe_permutation_async_comm`` and ``moe_allgather_overlap_comm``.
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
        legacy_flags=(
            LegacyFlag(
                flag="--moe-permutation-async-comm",
                where={"--moe-token-dispatcher-type": "allgather"},
            ),
            LegacyFlag(flag="--moe-allgather-overlap-comm"),
            LegacyFlag(
                flag="--moe-allgather-overlap-comm",
                key="plugins.moe-allgather.overlap_shared_experts",
            ),
        ),
        source="MindSpeed, allgather dispatcher optimisation",
    )
    config_class = MoeAllgatherConfig

    def __init__(self, config: MoeAllgatherConfig) -> None:
        self.config = config
        self._built: dict[int, AllGatherDispatcher] = {}

    @hookimpl
    def ascend_check(
        self, config: RunConfig, layout: Layout, manifests: Sequence[Manifest]
    ) -> Sequence[str]:
        chunks = self.config.overlap_chunks
        if not config.model.num_moe_experts or layout.ep * layout.expt_tp == 1 or chunks == 1:
            return []
        tokens = config.data.seq_length // layout.cp * config.train.micro_batch_size
        if config.parallel.sequence_parallel:
            tokens //= layout.tp
        links = {manifest.name: manifest.forward_links.get("experts") for manifest in manifests}
        most = tokens, "tokens of a rank"
        problems = [*chunk_problems("plugins.moe-allgather.overlap_chunks", chunks, most, links)]
        return [f"moe-allgather: {'; '.join(problems)}"] if problems else []

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        change = gathered(config, layout, rank)
        if change is None or layout.ep * layout.expt_tp == 1:
            return change
        sent = gathered_in_chunks(
            config,
            layout,
            rank,
            self.config.overlap_chunks,
            behind_shared=self.config.overlap_shared_experts,
        )
        return attrs.evolve(change, communication=(*change.communication, *sent))

    @hookimpl
    def ascend_token_dispatcher(
        self, groups: ProcessGroupCollection, layer_index: int
    ) -> c.Wrapper[c.TokenDispatcher]:
        from ascend_run.ops.experts import all_gather_dispatcher, chunked_all_gather

        chunks = self.config.overlap_chunks if groups.tp_ep.size() > 1 else 1

        def wrap(inner: Any) -> AllGatherDispatcher:
            made = (
                chunked_all_gather.ChunkedGatherDispatcher(inner, chunks)
                if chunks > 1
                else all_gather_dispatcher.AllGatherDispatcher(inner)
            )
            self._built[layer_index] = made
            return made

        return wrap

    @hookimpl
    def ascend_moe_layer(
        self, config: RunConfig, groups: ProcessGroupCollection, layer_index: int
    ) -> ModuleWrapper | None:
        dispatcher = self._built.pop(layer_index)
        shared = config.model.moe_shared_expert_intermediate_size
        if not (self.config.overlap_shared_experts and shared) or groups.tp_ep.size() == 1:
            return None
        from ascend_run.ops.experts.deferred_experts import DeferredExperts

        def wrap(module: Any) -> Any:
            dispatcher.shared_experts = DeferredExperts(module)
            return module

        return wrap
