"""ALiBi: attention falls off with distance, in place of position embeddings."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    Claim,
    Condition,
    Manifest,
    Maturity,
    Numerics,
    PositionBias,
    RunConfig,
    Support,
    hookimpl,
)

from .slopes import slopes


@attrs.frozen(kw_only=True)
class AlibiConfig:
    """Options, set by ``plugins.alibi.<field>=<value>``."""

    distance: Literal["linear", "root"] = "linear"
    """What the slopes are multiplied with: the distance of query and key, or its square root."""
    max_bias: float = attrs.field(default=8.0, validator=attrs.validators.gt(0.0))
    """The last head's slope is 2 to the power of minus this."""


class Alibi:
    """A score is lowered by a slope of its head times the distance of query and key.

    The bias is data, slopes and positions: the kernel makes the part that it works on, or hands
    both to an operator that does.
    Source: Press et al. 2022, arXiv:2108.12409.
    """

    manifest = Manifest(
        name="alibi",
        summary="positions by attention that falls off with distance, a slope a head",
        claims=(Claim.POSITION_BIAS,),
        requires=(
            Condition(
                "model.position_embedding_type",
                "==",
                "none",
                why="its positions are the bias",
                fix="set model.position_embedding_type=none",
            ),
        ),
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        attention_needs=AttentionFeatures(position_bias=True),
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            "--position-embedding-type alibi",
            "--alibi-fusion-attn-type",
            "--alibi-diagonal-opposite",
            "--square-alibi-mask",
            "--fill-neg-inf",
        ),
        source="ALiBi, arXiv:2108.12409",
    )
    config_class = AlibiConfig

    def __init__(self, config: AlibiConfig) -> None:
        self.config = config
        self._made: PositionBias | None = None

    @hookimpl
    def ascend_position_bias(self, config: RunConfig, device: Any, groups: Any) -> PositionBias:
        if self._made is None:  # one for all layers
            import torch

            whole = slopes(config.model.num_attention_heads, self.config.max_bias)
            here = len(whole) // groups.tp.size()
            first = groups.tp.rank() * here
            mine = torch.tensor(whole[first : first + here], dtype=torch.float64)
            self._made = PositionBias(
                slopes=mine.to(device.torch_device), root=self.config.distance == "root"
            )
        return self._made
