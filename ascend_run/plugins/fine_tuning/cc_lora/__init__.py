"""CCLoRA: the collectives of adapters overlapped with the matmuls of their linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.plugin_api import (
    Claim,
    Condition,
    CostChange,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c

ADAPTERS: Final = "lora"
"""The plugin whose adapters it computes."""


@attrs.frozen(kw_only=True)
class CcLoraOptions:
    """Options, set by ``plugins.cc-lora.<field>=<value>``."""

    slices: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Number of slices of a matmul's rows, whose collectives overlap with the matmuls of others; 1
    does not slice. With fewer rows, every row is a slice."""
    merge: bool = False
    """Add an adapter to its weight and multiply once, in linears of at most as many inputs as a
    micro-batch has tokens. The sum is rounded to the weight's dtype: in bf16, updates below 1/512
    of a weight are lost."""


class CcLora:
    """Compute each linear together with its adapter of ``lora``, as one function.

    Cost: the collectives of adapters are launched before a matmul with the weight and awaited after
    it, and one gather of a row-parallel output's gradient serves both. Those of linears are sent in
    slices that overlap with matmuls. Numerics: the reduction order; with ``merge`` also one
    rounding of the sum of weight and adapter. Source: the behaviour of MindSpeed-LLM's CCLoRA.
    """

    manifest = Manifest(
        name="cc-lora",
        summary="overlap the collectives of adapters and of their linears with matmuls",
        claims=(Claim.LINEAR_COMM,),
        requires=(ADAPTERS,),
        after=(ADAPTERS,),
        idle=Condition.one_rank("tensor_model_parallel_size", why="linears need no collectives"),
        forward_links={"linear": LinkPlace.OWN},
        numerics=Numerics.ROUNDING,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it acts beside lora only
        legacy_flags=(LegacyFlag(flag="--lora-fusion"),),
        source="MindSpeed-LLM, docs/features/cc_lora.md",
    )
    config_class = CcLoraOptions

    def __init__(self, config: CcLoraOptions) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        adapters, problems = config.plugins[ADAPTERS], []
        if self.config.merge and adapters.dropout:
            problems.append(
                f"plugins.cc-lora.merge=true with plugins.lora.dropout={adapters.dropout}: an "
                "adapter that reads another input than its linear cannot be added to the weight; "
                "set plugins.lora.dropout=0, or leave plugins.cc-lora.merge out"
            )
        if adapters.dora:
            problems.append(
                "cc-lora: plugins.lora.dora=true scales the sum of a linear and its adapter, which "
                "are one function here; set it to false, or leave cc-lora out"
            )
        return problems

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if layout.tp == 1:
            return None
        from .cost import cost_change

        return cost_change(config, layout, rank, self.config)

    @hookimpl
    def ascend_linear(self, config: RunConfig, ops: PlatformOps) -> c.ModuleWrapper | None:
        if config.parallel.tensor_model_parallel_size == 1:
            return None
        from .linears import link

        return lambda linear: link(linear, self.config, ops)
