"""ALiBi: attention scores biased by distance, instead of position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Condition,
    Device,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PositionBias,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@attrs.frozen(kw_only=True)
class AlibiConfig:
    """Options, set by ``plugins.alibi.<field>=<value>``."""

    distance: Literal["linear", "root"] = "linear"
    """What a slope multiplies: the distance between query and key, or its square root."""
    max_bias: float = attrs.field(default=8.0, validator=attrs.validators.gt(0.0))
    """The slope of the last head is 2 to the power of minus this."""


class Alibi:
    """Subtract from each score the slope of its head times the distance between query and key.

    The bias is described by slopes and positions: the kernel builds the part that it needs, or
    passes both to an operator that does. Source: Press et al. 2022, arXiv:2108.12409.
    """

    manifest = Manifest(
        name="alibi",
        summary="ALiBi: attention scores lowered with distance, by one slope per head",
        requires=(
            Condition(
                "model.position_embedding_type",
                "==",
                "none",
                why="ALiBi replaces position embeddings",
                fix="set model.position_embedding_type=none",
            ),
        ),
        small_model_settings={"model.position_embedding_type": "none"},
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        attention_needs=AttentionFeatures(position_bias=True),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(flag="--position-embedding-type", values={"alibi": True}),
            LegacyFlag(
                flag="--position-embedding-type",
                key="model.position_embedding_type",
                values={"alibi": "none"},
            ),
            LegacyFlag(
                flag="--alibi-fusion-attn-type",
                key="plugins.alibi.distance",
                values={"0": "linear", "2": "linear", "3": "root"},
            ),
            LegacyFlag(flag="--alibi-diagonal-opposite", key="", values={}),
            LegacyFlag(flag="--square-alibi-mask", key="", values={}),
            LegacyFlag(flag="--fill-neg-inf", key="", values={}),
        ),
        source="ALiBi, arXiv:2108.12409",
    )
    config_class = AlibiConfig

    def __init__(self, config: AlibiConfig) -> None:
        self.config = config
        self._made: PositionBias | None = None

    @hookimpl
    def ascend_position_bias(
        self, config: RunConfig, device: Device, groups: ProcessGroupCollection
    ) -> PositionBias:
        if self._made is None:  # one for all layers
            from ascend_run.ops.attention.alibi import alibi

            self._made = alibi(
                config.model.num_attention_heads,
                groups.tp,
                device.torch_device,
                max_bias=self.config.max_bias,
                root=self.config.distance == "root",
            )
        return self._made
