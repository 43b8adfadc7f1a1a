"""Recompute the norms of layers in backward instead of saving what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api import (
    ActivationTreatment,
    LegacyFlag,
    Manifest,
    Numerics,
    RunConfig,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import discarded, is_among_first

_READERS: Final = {"input_layernorm": "self_attention", "pre_mlp_layernorm": "mlp"}
"""Norm -> the module that reads its output."""


@attrs.frozen(kw_only=True)
class RecomputeNormConfig:
    """Options, set by ``plugins.recompute-norm.<field>=<value>``."""

    num_layers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Number of layers per pipeline rank: the first of every chunk, then the second of every chunk;
    those that are recomputed whole count. Default: all. Unit: layers."""


class RecomputeNorm:
    """Free the outputs of both norms of a layer once the attention or the MLP has run, and
    recompute them in backward from the residual stream.

    Cost: the norms, once more. Numerics: bitwise neutral. Source: the behaviour of MindSpeed's
    ``--recompute-norm``; Megatron's CheckpointWithoutOutput.
    """

    manifest = Manifest(
        name="recompute-norm",
        summary="recompute the norms of layers instead of saving their outputs",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes time: only where memory is short
        legacy_flags=(
            LegacyFlag(flag="--recompute-norm"),
            LegacyFlag(
                flag="--recompute-norm-num-layers",
                key="plugins.recompute-norm.num_layers",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/norm-recompute.md",
    )
    config_class = RecomputeNormConfig

    def __init__(self, config: RecomputeNormConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problem = (
            "recompute-norm: with model.norm_placement=post no norm is before the attention or the "
            "MLP; leave recompute-norm out"
        )
        return [problem] if config.model.norm_placement == "post" else []

    @hookimpl
    def ascend_activation_policy(
        self, place: int, chunk: int, num_chunks: int
    ) -> Mapping[str, ActivationTreatment]:
        if not is_among_first(self.config.num_layers, place, chunk, num_chunks):
            return {}
        return dict.fromkeys(_READERS, discarded(_READERS))
