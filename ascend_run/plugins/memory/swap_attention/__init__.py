"""Offload the activations that attention saves for backward to the host, and prefetch them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    Claim,
    CostChange,
    Device,
    ForwardLink,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Metrics,
    ModuleWrapper,
    Numerics,
    PipelineStage,
    Recomputation,
    ReportPanel,
    RunConfig,
    RunContext,
    SavedChange,
    Storage,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from .swapper import Swapper


MODULES: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm")
"""Submodules of a layer, by Megatron's names, in execution order."""
_PARTS: Final = dict(zip(MODULES, ("input_norm", "self_attention", "mlp_norm"), strict=True))
"""Module -> its part in the cost model."""
_RECOMPUTED: Final = ("mlp", "moe_layer")
_FEED_FORWARD: Final = ("mlp", "router", "dispatcher", "experts", "shared_experts")


def _some_modules(
    instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]
) -> None:
    unknown = [name for name in value if name not in MODULES]
    if unknown or not value or len({*value}) < len(value):
        raise ValueError(
            f"{attribute.name} must name some of {', '.join(map(repr, MODULES))}, each once, got "
            f"{', '.join(value) or 'none'}"
        )


@attrs.frozen(kw_only=True)
class SwapAttentionConfig:
    """Options, set by ``plugins.swap-attention.<field>=<value>``."""

    modules: tuple[str, ...] = attrs.field(default=("self_attention",), validator=_some_modules)
    """Submodules of every layer whose saved tensors are offloaded: ``input_layernorm``,
    ``self_attention``, ``pre_mlp_layernorm``."""

    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors with a smaller storage stay on the device. Unit: bytes."""
    prefetch: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How many layers ahead of its backward a layer is prefetched; 0 disables prefetching, so every
    layer waits for its copy. Unit: layers."""
    recompute_mlp_layers: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Number of layers per rank, from the first, whose MLP (dense or experts) is recomputed in
    backward instead of saved. Unit: layers."""


class SwapAttention:
    """Keep what the attention of every layer saves for backward in host memory.

    Cost: each offloaded byte is copied twice, overlapped with the computation if the device
    supports it. Numerics: bitwise neutral. Source: the swap of MindSpeed's ``--swap-attention``;
    PyTorch's saved-tensor hooks.
    """

    manifest = Manifest(
        name="swap-attention",
        summary="offload the saved activations of attention to the host",
        claims=(Claim.SAVED_ACTIVATIONS,),
        forward_links=dict.fromkeys((*MODULES, *_RECOMPUTED), LinkPlace.AROUND),
        small_model_settings={"min_bytes": 1},
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.EMULATED,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        legacy_flags=(
            LegacyFlag(flag="--swap-attention"),
            LegacyFlag(flag="--swap-modules", key="plugins.swap-attention.modules", values=None),
        ),
        source="MindSpeed, docs/features/swap_attention.md",
    )
    config_class = SwapAttentionConfig

    def __init__(self, config: SwapAttentionConfig) -> None:
        self.config = config
        linked = (*config.modules, *(_RECOMPUTED if config.recompute_mlp_layers else ()))
        self.manifest = attrs.evolve(
            self.manifest, forward_links=dict.fromkeys(linked, LinkPlace.AROUND)
        )
        self._swapper: Swapper | None = None
        self._recomputed: set[tuple[str, int]] = set()

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        problems = list(self._recompute_problems(config, layout))
        granularity = config.model.recompute_granularity
        if granularity == "full":
            problems.append(
                "swap-attention: model.recompute_granularity=full saves no activations of the "
                "attention to offload; use selective recomputation, or leave swap-attention out"
            )
        return problems

    @hookimpl
    def ascend_cost(self, rank: PipelineStage) -> CostChange:
        """Return the activations that are offloaded, and the MLPs that are recomputed."""
        swapped = SavedChange(
            tensors=tuple(f"{_PARTS[name]}.*" for name in self.config.modules),
            storage=Storage.HOST,
            at_least=self.config.min_bytes,
            ahead=self.config.prefetch,
        )
        again = rank.layers[: self.config.recompute_mlp_layers]
        return CostChange(
            saved=(swapped,),
            recomputed=(Recomputation(parts=_FEED_FORWARD, layers=again),) if again else (),
        )

    @hookimpl
    def ascend_layer(self, device: Device) -> ModuleWrapper:
        from .swapper import Swapper

        if self._swapper is None:
            self._swapper = Swapper(
                device, min_bytes=self.config.min_bytes, prefetch=self.config.prefetch
            )
        swapper = self._swapper

        names = [name for name in MODULES if name in self.config.modules]

        def wrap(layer: nn.Module) -> dict[str, ForwardLink]:
            links = swapper.links([getattr(layer, name) for name in names])
            return dict(zip(names, links, strict=True))

        return wrap

    @hookimpl
    def ascend_mlp(self, role: str, layer_index: int) -> ModuleWrapper | None:
        return self._recomputing(role, layer_index)

    @hookimpl
    def ascend_moe_layer(self, role: str, layer_index: int) -> ModuleWrapper | None:
        return self._recomputing(role, layer_index)

    def _recomputing(self, role: str, layer_index: int) -> ModuleWrapper | None:
        """Recompute the first layers that this rank builds, over all of its virtual stages."""
        of_role = [index for name, index in self._recomputed if name == role]
        if len(of_role) >= self.config.recompute_mlp_layers:
            return None
        self._recomputed.add((role, layer_index))
        from .recompute import recomputed

        return recomputed

    def _recompute_problems(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        wanted = self.config.recompute_mlp_layers
        option = f"swap-attention: plugins.swap-attention.recompute_mlp_layers={wanted}"
        most = -(-config.model.num_layers // layout.pp)
        if wanted > most:
            yield (
                f"{option} is more than the {most} layers of a pipeline rank; use at most {most}"
            )
        twice = {"mlp", "moe"} & {*(config.model.recompute_modules or ())}
        if wanted and config.model.recompute_granularity == "selective" and twice:
            yield (
                f"{option} does not go with model.recompute_modules naming "
                f"{' and '.join(sorted(twice))}, which recomputes it already; leave out one"
            )

    @hookimpl
    def ascend_before_step(self) -> None:
        if self._swapper is not None:
            self._swapper.begin_step()

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"swap-attention": self._readings}

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        return [
            ReportPanel(
                title="Swapped activations", metrics=("swap-attention/swap_bytes",), unit="bytes"
            ),
            ReportPanel(
                title="Swapped activations that backward waited for",
                metrics=("swap-attention/late_fetches",),
                unit="layers",
            ),
        ]

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return the bytes offloaded in the last step, and the number of late prefetches."""
        swapper = self._swapper
        return {
            "swap_bytes": 0.0 if swapper is None else float(swapper.swapped_bytes),
            "late_fetches": 0.0 if swapper is None else float(swapper.late_fetches),
        }
