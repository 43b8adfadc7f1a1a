"""Recompute the activation function of MLPs in backward instead of saving what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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


@attrs.frozen(kw_only=True)
class RecomputeActivationConfig:
    """Options, set by ``plugins.recompute-activation.<field>=<value>``."""

    num_layers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Number of layers per pipeline rank: the first of every chunk, then the second of every chunk;
    those that are recomputed whole count. Default: all. Unit: layers."""


class RecomputeActivation:
    """Free the output of the activation function once the MLP has run, and recompute it in backward
    from the output of the first linear.

    Cost: the activation function, once more. Numerics: bitwise neutral. Source: the behaviour of
    MindSpeed's ``--recompute-activation-function``; Megatron's CheckpointWithoutOutput.
    """

    manifest = Manifest(
        name="recompute-activation",
        summary="recompute the activation function of MLPs instead of saving its output",
        conflicts={
            "moe-zero-memory": "it recomputes the activation of shared experts already; enable one"
        },
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes time: only where memory is short
        legacy_flags=(
            LegacyFlag(flag="--recompute-activation-function"),
            LegacyFlag(
                flag="--recompute-activation-function-num-layers",
                key="plugins.recompute-activation.num_layers",
                values=None,
            ),
        ),
        source="MindSpeed, docs/features/activation-function-recompute.md",
    )
    config_class = RecomputeActivationConfig

    def __init__(self, config: RecomputeActivationConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return list(_problems(config))

    @hookimpl
    def ascend_activation_policy(
        self, config: RunConfig, has_experts: bool, place: int, chunk: int, num_chunks: int
    ) -> Mapping[str, ActivationTreatment]:
        if not is_among_first(self.config.num_layers, place, chunk, num_chunks):
            return {}
        if has_experts and not _has_shared_experts(config):
            return {}
        mlp = "mlp.shared_experts" if has_experts else "mlp"
        part = f"{mlp}.activation_func"
        return {part: discarded({part: mlp})}


def _has_shared_experts(config: RunConfig) -> bool:
    """Return whether a layer with experts has shared ones, computed apart from the dispatcher."""
    model = config.model
    return bool(model.moe_shared_expert_intermediate_size) and not model.moe_shared_expert_overlap


def _problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.activation == "relu" and not model.gated_linear_unit:
        yield (
            "recompute-activation: the backward of model.activation=relu reads only its output, "
            "which the next linear saves; recomputed, its input is saved instead, of the same "
            "size; leave recompute-activation out"
        )
