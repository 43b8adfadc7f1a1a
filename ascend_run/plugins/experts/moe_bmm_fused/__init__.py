"""Padded experts whose matmuls and exchange of tokens are one operator, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ascend_run.ops.experts.dispatcher_cost import ALL_TO_ALL, CAPACITY, PADDED
from ascend_run.plugin_api import (
    Claim,
    Condition,
    CostChange,
    ExpertsKernel,
    Layout,
    LegacyFlag,
    Manifest,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    hookimpl,
)

from .cost import exchanged_cost

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class MoeBmmFusedConfig:
    """Options, set by ``plugins.moe-bmm-fused.<field>=<value>``."""

    gradient_accumulation_fusion: bool = False
    """Accumulate the gradients of the experts' weights directly in the buffer that is reduced, in
    its dtype, instead of in a separate tensor that is then added to it."""


class MoeBmmFused:
    """Exchange the tokens of padded experts within their matmuls.

    The dispatcher permutes and pads only; the experts get the rows of this rank for all experts,
    and exchange them. Cost: no weights of rows are exchanged; the outputs of a rank's own rows are
    saved, and only the output of fc1 of the rest. Numerics: rows are weighted after fc2 instead of
    before it. Source: MindSpeed's ``--moe-bmm-mc2``.
    """

    manifest = Manifest(
        name="moe-bmm-fused",
        summary="exchange the tokens of padded experts within their matmuls",
        claims=(Claim.TOKEN_DISPATCHER,),
        requires=(ALL_TO_ALL, CAPACITY, PADDED),
        conflicts={
            "hot-experts": "padded experts have equal numbers of rows, so none is busier; enable "
            "one of them",
            "moe-adaptive-recompute": "each rank decides alone whether its experts are recomputed, "
            "and they exchange tokens; set model.recompute_modules=moe instead",
            "moe-zero-memory": "it recomputes experts apart from the exchange of their tokens; set "
            "model.recompute_modules=moe instead",
        },
        after=("moe-permute-fusion",),
        idle=Condition.one_rank("expert_model_parallel_size", why="all experts are on every rank"),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.EMULATED, "npu": Support.UNVERIFIED},
        small_model_settings={
            "model.moe_expert_capacity_factor": 1.99,
            "model.moe_pad_expert_input_to_capacity": True,
        },
        level=3,  # it would exclude gmm and moe-alltoall from level 2
        legacy_flags=(
            LegacyFlag(flag="--moe-bmm-mc2"),
            LegacyFlag(
                flag="--gemm-gradient-accumulation-fusion",
                key="plugins.moe-bmm-fused.gradient_accumulation_fusion",
                where={"--moe-bmm-mc2": ""},
            ),
        ),
        source="MindSpeed, docs/features/megatron_moe/megatron-moe-bmm-fused.md",
    )
    config_class = MoeBmmFusedConfig

    def __init__(self, config: MoeBmmFusedConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.ep == 1 or not rank.moe_layers:
            return None
        return exchanged_cost(config, layout, rank)

    @hookimpl
    def ascend_token_dispatcher(self, config: RunConfig) -> c.Wrapper[c.TokenDispatcher] | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        from ascend_run.ops.experts.exchanged_experts import LocalDispatcher

        return LocalDispatcher

    @hookimpl
    def ascend_experts(
        self, config: RunConfig, groups: ProcessGroupCollection
    ) -> ExpertsKernel | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        from .kernel import ExchangedExperts

        return ExchangedExperts(
            groups.ep, groups.expt_tp, accumulate=self.config.gradient_accumulation_fusion
        )
