"""Empty places among the layers, so that a pipeline can be dealt out evenly."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.plugin_api import (
    Layout,
    Manifest,
    Maturity,
    Numerics,
    RunConfig,
    Support,
    hookimpl,
)

from .rules import problems


@attrs.frozen(kw_only=True)
class NoopLayersConfig:
    """Options, set by ``plugins.noop-layers.<field>=<value>``."""

    layers: tuple[int, ...] = ()
    """Places that stay empty, from 0; ``model.num_layers`` counts them too."""


class NoopLayers:
    """Leave some of ``model.num_layers`` places empty: the hidden state passes through unchanged.

    Cost: a copy of the hidden state each; no parameters, no messages. Numerics: the model is the
    one of the other layers alone, bit for bit.
    """

    manifest = Manifest(
        name="noop-layers",
        summary="leave places among the layers empty, to deal a pipeline out evenly",
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=("--noop-layers",),
    )
    config_class = NoopLayersConfig

    def __init__(self, config: NoopLayersConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return problems(self.config.layers, config, layout)

    @hookimpl
    def ascend_empty_layers(self) -> Sequence[int]:
        return self.config.layers
