"""Keep the master weights of a bf16 model as bf16 weights and 16 more bits each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs

from ascend_run.plugin_api import (
    Claim,
    Condition,
    CostChange,
    Layout,
    LegacyFlag,
    Manifest,
    MixedPrecisionOptimizer,
    Numerics,
    PipelineStage,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import memory_cost


@attrs.frozen(kw_only=True)
class ReuseFp32ParamConfig:
    """Options, set by ``plugins.reuse-fp32-param.<field>=<value>``."""

    bucket_size: int = attrs.field(default=4_194_304, validator=attrs.validators.ge(1))
    """Master weights that exist in float32 at once during the optimizer's step; at least those of
    one parameter. Unit: elements."""


class ReuseFp32Param:
    """Hold of each float32 master weight only the 16 bits that its bf16 weight lacks.

    Cost: the master weights are put together and taken apart in each step. Numerics: bitwise
    neutral. Source: the behaviour of MindSpeed's ``--reuse-fp32-param``.
    """

    manifest = Manifest(
        name="reuse-fp32-param",
        summary="keep of each float32 master weight what its bf16 weight lacks",
        claims=(Claim.PARAMETER_STORAGE,),
        idle=Condition(
            "train.precision",
            "==",
            "fp32",
            why="there are no master weights",
            fix="set train.precision=bf16",
        ),
        small_model_settings={"bucket_size": 1000},
        exercised_by="train.precision=bf16",
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=2,
        legacy_flags=(LegacyFlag(flag="--reuse-fp32-param"),),
        source="MindSpeed, docs/features/reuse-fp32-param.md",
    )
    config_class = ReuseFp32ParamConfig

    def __init__(self, config: ReuseFp32ParamConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problem = (
            "reuse-fp32-param: train.precision=fp16 has other exponents than float32, so its "
            "weights are no half of the master weights; use bf16"
        )
        return [problem] if config.train.precision == "fp16" else []

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        if config.train.precision != "bf16":
            return None
        return memory_cost(config, layout, rank, self.config.bucket_size)

    @hookimpl
    def ascend_mixed_precision_optimizer(
        self, config: RunConfig
    ) -> Wrapper[type[MixedPrecisionOptimizer]] | None:
        if config.train.precision != "bf16":
            return None
        from .optimizer import reusing

        return partial(reusing, bucket_size=self.config.bucket_size)
