"""A soft cap on attention scores."""

from __future__ import annotations

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Manifest,
    Maturity,
    Numerics,
    Support,
    Wrapper,
    hookimpl,
)


@attrs.frozen(kw_only=True)
class ScoreCapConfig:
    """Options, set by ``plugins.score-cap.<field>=<value>``."""

    cap: float = attrs.field(default=0.5, validator=attrs.validators.gt(0.0))
    """A score becomes ``cap * tanh(score / cap)``. Without unit."""


class ScoreCap:
    """Cap attention scores softly. Numerics: another model, by design."""

    manifest = Manifest(
        name="score-cap",
        summary="cap attention scores softly",
        attention=AttentionFeatures.all_but("softcap"),
        attention_needs=AttentionFeatures(softcap=True),
        numerics=Numerics.MODEL,
        platforms={"cpu": Support.REAL},
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )
    config_class = ScoreCapConfig

    def __init__(self, config: ScoreCapConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_attention(self) -> Wrapper[AttentionKernel]:
        from .kernel import CappedKernel

        return lambda inner: CappedKernel(inner, self.config.cap)
