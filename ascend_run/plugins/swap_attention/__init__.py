"""Swap what attention keeps for backward to the host, and bring it back in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.plugin_api import (
    Claim,
    CostChange,
    Device,
    KeptChange,
    Layout,
    Manifest,
    Metrics,
    Numerics,
    Place,
    RankKind,
    Recomputation,
    ReportPanel,
    RunConfig,
    RunContext,
    Support,
    Wrapper,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from .swapper import Swapper


MODULES: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm")
"""Of a layer, by Megatron's names, in the order in which it runs them."""
_PARTS: Final = dict(zip(MODULES, ("input_norm", "self_attention", "mlp_norm"), strict=True))
"""Module -> its part in the cost model; so for the next."""
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
    """Parts of every layer whose saved tensors are swapped: ``input_layernorm``,
    ``self_attention``, ``pre_mlp_layernorm``."""

    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors in a smaller storage stay where they are. Unit: bytes."""
    prefetch: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How far ahead of its backward a layer is brought back; 0 waits for every layer.
    Unit: layers."""
    recompute_mlp_layers: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """On each rank, of how many layers, from the first, the feed-forward (dense or experts) is
    computed again in backward rather than kept. Unit: layers."""


class SwapAttention:
    """Keep on the host what the attention of every layer saves for its backward.

    Cost: each swapped byte travels twice, beside the computation where the device can. Numerics:
    bitwise. Source: the swap of MindSpeed's ``--swap-attention``; PyTorch's saved-tensor hooks.
    """

    manifest = Manifest(
        name="swap-attention",
        summary="keep on the host what attention saves for its backward",
        claims=(Claim.SAVED_ACTIVATIONS,),
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.EMULATED,
            "cuda": Support.UNVERIFIED,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        legacy_flags=("--swap-attention", "--swap-modules"),
        source="MindSpeed, docs/features/swap_attention.md",
    )
    config_class = SwapAttentionConfig

    def __init__(self, config: SwapAttentionConfig) -> None:
        self.config = config
        self._swapper: Swapper | None = None
        self._recomputed: set[tuple[str, int]] = set()

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        problems = list(self._recompute_problems(config, layout))
        granularity = config.model.get("recompute_granularity")
        if granularity == "full":
            problems.append(
                "swap-attention: model.recompute_granularity=full keeps nothing of the attention "
                "that could be swapped; use selective recomputation, or leave swap-attention out"
            )
        return problems

    @hookimpl
    def ascend_cost(self, rank: RankKind) -> CostChange:
        """What the modules keep waits on the host; the first layers' feed-forward runs twice."""
        swapped = KeptChange(
            tensors=tuple(f"{_PARTS[name]}.*" for name in self.config.modules),
            place=Place.HOST,
            at_least=self.config.min_bytes,
            ahead=self.config.prefetch,
        )
        again = rank.layers[: self.config.recompute_mlp_layers]
        return CostChange(
            kept=(swapped,),
            recomputed=(Recomputation(parts=_FEED_FORWARD, layers=again),) if again else (),
        )

    @hookimpl
    def ascend_layer(self, device: Device) -> Wrapper[nn.Module]:
        from .swapper import Swapper

        if self._swapper is None:
            self._swapper = Swapper(
                device, min_bytes=self.config.min_bytes, prefetch=self.config.prefetch
            )
        swapper = self._swapper

        def wrap(layer: nn.Module) -> nn.Module:
            swapper.wrap([getattr(layer, name) for name in MODULES if name in self.config.modules])
            return layer

        return wrap

    @hookimpl
    def ascend_mlp(self, role: str, layer_index: int) -> Wrapper[nn.Module] | None:
        return self._recomputing(role, layer_index)

    @hookimpl
    def ascend_moe_layer(self, role: str, layer_index: int) -> Wrapper[nn.Module] | None:
        return self._recomputing(role, layer_index)

    def _recomputing(self, role: str, layer_index: int) -> Wrapper[nn.Module] | None:
        """For the first layers that this rank builds; in a virtual pipeline, of its chunks."""
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
        twice = {"mlp", "moe"} & {*(config.model.get("recompute_modules") or ())}
        if wanted and config.model.get("recompute_granularity") == "selective" and twice:
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
        """Bytes that this rank sent to the host in the last step, and how often it was late."""
        swapper = self._swapper
        return {
            "swap_bytes": 0.0 if swapper is None else float(swapper.swapped_bytes),
            "late_fetches": 0.0 if swapper is None else float(swapper.late_fetches),
        }
