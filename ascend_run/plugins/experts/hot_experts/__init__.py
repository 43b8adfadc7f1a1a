"""Replicate the busiest experts on all ranks for one forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import attrs

from ascend_run.ops.experts.dispatcher_cost import ALL_TO_ALL, not_padded
from ascend_run.plugin_api import (
    Condition,
    CostChange,
    ForwardLink,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Metrics,
    ModuleWrapper,
    Numerics,
    PipelineStage,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    hookimpl,
)

from .cost import replica_cost

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch import nn

    from ascend_run.ops.experts.hot_experts import HotChoice
    from ascend_run.plugin_api import contracts as c


@attrs.frozen(kw_only=True)
class HotExpertsConfig:
    """Options, set by ``plugins.hot-experts.<field>=<value>``."""

    num_experts: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """Experts of each layer that every expert-parallel rank has a replica of, if each lowers the
    rows of the fullest rank; at most the experts of a rank."""


class HotExperts:
    """Balance expert-parallel ranks: tokens of the busiest experts are computed where they are.

    The experts are chosen in each forward, by its own counts. Their weights are broadcast, and the
    gradients of the replicas are reduced to the owners. Cost: the weights of the replicas, once in
    each direction, and their memory. Numerics: an expert's gradient is summed in a different order.
    Source: the behaviour of MindSpeed's ``--balanced-moe-experts``.
    """

    manifest = Manifest(
        name="hot-experts",
        summary="replicate the busiest experts on all ranks, chosen in each forward",
        requires=(
            ALL_TO_ALL,
            not_padded("padded experts have equal numbers of rows, so none is busier"),
        ),
        conflicts={
            "moe-adaptive-recompute": "each rank decides alone whether its experts are recomputed, "
            "and all ranks exchange replicas; use moe-zero-memory",
            "moe-allgather": "it needs model.moe_token_dispatcher_type=allgather, and hot-experts "
            "needs alltoall; enable one of them",
        },
        after=("moe-alltoall", "moe-permute-fusion"),
        idle=Condition.one_rank("expert_model_parallel_size", why="all experts are on every rank"),
        exercised_by="verify it with more experts, or a higher plugins.hot-experts.num_experts: no "
        "replica would have lowered the rows of the fullest rank",
        small_model_settings={"num_experts": 1},
        forward_links={"experts": LinkPlace.AROUND},
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.EMULATED, "npu": Support.UNVERIFIED},
        level=2,
        legacy_flags=(
            LegacyFlag(flag="--balanced-moe-experts"),
            LegacyFlag(
                flag="--balanced-moe-hot-expert-num",
                key="plugins.hot-experts.num_experts",
                values=None,
            ),
            LegacyFlag(flag="--trans-hot-expert-group-num", key="", values={}),
        ),
        source="MindSpeed, --balanced-moe-experts",
    )
    config_class = HotExpertsConfig

    def __init__(self, config: HotExpertsConfig) -> None:
        self.config = config
        self._choices: list[HotChoice] = []

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        experts, wanted = config.model.num_moe_experts, self.config.num_experts
        if not experts or layout.ep == 1:
            return []
        problems, local = [], experts // layout.ep
        if wanted > local:
            problems.append(
                f"plugins.hot-experts.num_experts={wanted} is more than the {local} experts of a "
                f"rank; use at most {local}"
            )
        if layout.expt_tp > 1:
            problems.append(
                f"parallel.expert_tensor_parallel_size={layout.expt_tp} shards the experts that "
                "would be replicated; set it to 1"
            )
        return [f"hot-experts: {'; '.join(problems)}"] if problems else []

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.ep == 1:
            return None
        return replica_cost(config, layout, rank, self.config.num_experts)

    @hookimpl
    def ascend_token_dispatcher(self, config: RunConfig) -> c.Wrapper[c.TokenDispatcher] | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        from ascend_run.ops.experts.hot_dispatcher import HotDispatcher

        number = self.config.num_experts
        return lambda inner: HotDispatcher(inner, number, self._see)

    @hookimpl
    def ascend_moe_layer(
        self, config: RunConfig, groups: ProcessGroupCollection
    ) -> ModuleWrapper | None:
        if config.parallel.expert_model_parallel_size == 1:
            return None
        from ascend_run.ops.experts.hot_replicas import replica_link

        def wrap(module: nn.Module) -> dict[str, ForwardLink]:
            experts: Any = module.experts
            return {"experts": replica_link(experts, groups.ep)}

        return wrap

    @hookimpl
    def ascend_before_step(self) -> None:
        self._choices.clear()

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"hot-experts": self._readings}

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return [
            ReportPanel(
                title="Rows of the fullest rank by the mean",
                metrics=("hot-experts/before", "hot-experts/after"),
                unit="ratio",
            ),
            ReportPanel(
                title="Replicated experts of a layer",
                metrics=("hot-experts/replicas",),
                unit="experts",
            ),
        ]

    def _see(self, choice: HotChoice) -> None:
        """Keep a choice of a training step; between steps there may be other forwards."""
        import torch

        if torch.is_grad_enabled():
            self._choices.append(choice)

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return the means over this rank's forwards of the last step: the rows of the fullest rank
        by the mean of all, without replicas and with them, and the number of replicas."""
        if not (choices := self._choices):
            return {}
        return {
            "before": fmean(max(c.rows_before) / fmean(c.rows_before) for c in choices),
            "after": fmean(max(c.rows_after) / fmean(c.rows_after) for c in choices),
            "replicas": fmean(len(c.experts) for c in choices),
        }
