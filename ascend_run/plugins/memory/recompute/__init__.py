"""Recompute layers, or modules of them, in backward instead of saving their activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ascend_run.plugins.memory import is_among_first, recomputed, some_of

MODULES: Final = ("core_attn", "mlp", "moe", "shared_experts")
"""What ``granularity=selective`` can recompute, by Megatron's names."""


@attrs.frozen(kw_only=True)
class RecomputeConfig:
    """Options, set by ``plugins.recompute.<field>=<value>``."""

    granularity: str = attrs.field(
        default="full", validator=attrs.validators.in_(("full", "selective"))
    )
    """``full``: whole layers; ``selective``: ``modules`` of layers."""
    method: str = attrs.field(default="block", validator=attrs.validators.in_(("block", "uniform")))
    """With ``granularity=full``: ``block`` recomputes ``num_layers`` layers, one by one;
    ``uniform`` recomputes all layers, ``num_layers`` at a time."""
    num_layers: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Number of layers per pipeline rank: the first of every chunk, then the second of every chunk;
    default: all. With ``method=uniform`` the layers that are recomputed at once; default: 1. Unit:
    layers."""
    modules: tuple[str, ...] = attrs.field(default=("mlp", "moe"), validator=some_of(MODULES))
    """With ``granularity=selective``: ``core_attn``, ``mlp`` (of layers without experts), ``moe``
    (the experts with their router), ``shared_experts``."""


class Recompute:
    """Save only the input of layers, or of modules of them, and repeat their forward in backward.

    Cost: the forward of what is recomputed. Numerics: bitwise neutral. Source: arXiv:1604.06174;
    Megatron's ``--recompute-*``, and MindSpeed's counts by pipeline rank.
    """

    manifest = Manifest(
        name="recompute",
        summary="recompute layers or modules of them, so many per pipeline rank",
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes time: only where memory is short
        legacy_flags=(
            LegacyFlag(flag="--enable-recompute-layers-per-pp-rank"),
            LegacyFlag(
                flag="--recompute-num-layers",
                key="plugins.recompute.num_layers",
                values=None,
                where={"--enable-recompute-layers-per-pp-rank": ""},
            ),
        ),
        source="arXiv:1604.06174",
    )
    config_class = RecomputeConfig

    def __init__(self, config: RecomputeConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_defaults(self) -> Mapping[str, object]:
        """Return Megatron's own options for what is the same in every layer."""
        if self._is_uniform:
            return {
                "model.recompute_granularity": "full",
                "model.recompute_method": "uniform",
                "model.recompute_num_layers": self.config.num_layers or 1,
            }
        if self._recomputes_scores:
            return {
                "model.recompute_granularity": "selective",
                "model.recompute_modules": ("core_attn",),
            }
        return {}

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return [*self._contradictions(), *self._other_options_of_megatron(config)]

    def _contradictions(self) -> Iterator[str]:
        own, given = "plugins.recompute.", self.config
        modules, whole = ", ".join(given.modules), given.granularity == "full"
        if whole and {*given.modules} != {*RecomputeConfig().modules}:
            yield (
                f"recompute: {own}modules={modules} needs {own}granularity=selective; set it, or "
                f"leave out {own}modules"
            )
        if not whole and given.method == "uniform":
            yield (
                f"recompute: {own}method=uniform takes whole layers, not those modules of "
                f"{own}granularity=selective; leave out one"
            )
        if self._recomputes_scores and given.num_layers is not None:
            yield (
                f"recompute: {own}num_layers={given.num_layers} does not go with core_attn in "
                f"{own}modules, which is recomputed in every layer; leave out one"
            )

    def _other_options_of_megatron(self, config: RunConfig) -> Iterator[str]:
        for key, wanted in self.ascend_defaults().items():
            given = getattr(config.model, key.removeprefix("model."))
            if given != wanted:
                yield (
                    f"recompute: {key}={_text(given)} is not {_text(wanted)}, as its own options "
                    f"say; leave out {key}"
                )

    @property
    def _is_uniform(self) -> bool:
        return self.config.granularity == "full" and self.config.method == "uniform"

    @property
    def _recomputes_scores(self) -> bool:
        return self.config.granularity == "selective" and "core_attn" in self.config.modules

    @hookimpl
    def ascend_activation_policy(
        self, config: RunConfig, has_experts: bool, place: int, chunk: int, num_chunks: int
    ) -> Mapping[str, ActivationTreatment] | None:
        first = is_among_first(self.config.num_layers, place, chunk, num_chunks)
        acts = first and not self._is_uniform
        treated = self._treated(config, has_experts) if acts else {}
        return treated or (None if self.ascend_defaults() else {})  # None: Megatron's options act

    def _treated(self, config: RunConfig, has_experts: bool) -> Mapping[str, ActivationTreatment]:
        if self.config.granularity == "full":
            return {"": recomputed()}
        if ("moe" if has_experts else "mlp") in self.config.modules:
            return {"mlp": recomputed()}
        model = config.model
        shared = model.moe_shared_expert_intermediate_size and not model.moe_shared_expert_overlap
        if has_experts and shared and "shared_experts" in self.config.modules:
            return {"mlp.shared_experts": recomputed()}
        return {}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
