"""Empty layer slots, so that pipeline stages can be balanced."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_run.plugin_api import (
    ANY,
    Layout,
    LegacyFlag,
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
    """Layer slots that stay empty, from 0; ``model.num_layers`` counts them too."""


class NoopLayers:
    """Leave some of the ``model.num_layers`` layer slots empty: the hidden state passes unchanged.

    Cost: a copy of the hidden state per slot; no parameters, no communication. Numerics: bitwise
    equal to the model of the other layers alone.
    """

    manifest = Manifest(
        name="noop-layers",
        summary="leave layer slots empty, to divide a pipeline evenly",
        small_model_settings={"layers": [1], "model.num_layers": 4},
        numerics=Numerics.MODEL,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.BETA,
        legacy_flags=(
            LegacyFlag(flag="--noop-layers", values={ANY: True}),
            LegacyFlag(flag="--noop-layers", key="plugins.noop-layers.layers", values=None),
        ),
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
