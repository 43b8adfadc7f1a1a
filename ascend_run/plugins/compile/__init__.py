"""torch.compile of the layers: what is elementwise between two matrix products is one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.kernels.compilers import missing_compiler
from ascend_run.plugin_api import (
    CostChange,
    KeptChange,
    Layout,
    Manifest,
    Maturity,
    Numerics,
    Place,
    RankKind,
    RunConfig,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.plugin_api import contracts as c

    from .layers import LayerCompiler

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_CUDA_GRAPHS: Final = ("reduce-overhead", "max-autotune")
REGIONS: Final = ("layer", "parts")


@attrs.frozen(kw_only=True)
class CompileConfig:
    """Options, set by ``plugins.compile.<field>=<value>``."""

    regions: str = attrs.field(default="layer", validator=attrs.validators.in_(REGIONS))
    """What is compiled: ``layer`` (whole layers, the attention kernel between two graphs) or
    ``parts`` (each norm and each dense feed-forward by itself, the rest of the layer as it is)."""
    mode: str = attrs.field(default="default", validator=attrs.validators.in_(MODES))
    """torch.compile's: how long it may search, and whether it records CUDA graphs."""
    dynamic: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "yes", "no"))
    )
    """Graphs for any size: from the second size on (``auto``), at once, or never."""
    fullgraph: bool = False
    """Refuse code that does not fit in one graph, rather than compile around it."""
    max_graphs: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Variants of one piece of code; what comes after them runs without being compiled."""


class Compile:
    """Layers run as compiled graphs; attention kernels, experts and collectives stay as they are.

    Cost: the first step takes seconds more for each variant of a layer; a dense layer does not keep
    the non-linearity of its gate. Numerics: elementwise chains are rounded once where they were
    rounded at each link. Source: torch.compile, doi:10.1145/3620665.3640366.
    """

    manifest = Manifest(
        name="compile",
        summary="compile layers with torch.compile, fusing what is elementwise",
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.UNVERIFIED},
        level=2,
        # What has a forward of another plugin's stays outside of graphs, so it must be there.
        after=("swap-attention",),
        maturity=Maturity.BETA,
        source="torch.compile, doi:10.1145/3620665.3640366",
    )
    config_class = CompileConfig

    def __init__(self, config: CompileConfig) -> None:
        self.config = config
        self._compiler: LayerCompiler | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problems = []
        if self.config.fullgraph and self.config.regions != "parts":
            problems.append(
                "compile: plugins.compile.fullgraph=true asks for one graph, and a layer has two "
                "with the attention kernel between them; use plugins.compile.regions=parts too, "
                "or leave fullgraph out"
            )
        if config.platform == "cpu":
            problems += self._problems_on_the_cpu()
        return problems

    def _problems_on_the_cpu(self) -> list[str]:
        problems = []
        if self.config.mode in WITH_CUDA_GRAPHS:
            problems.append(
                f"compile: plugins.compile.mode={self.config.mode} records CUDA graphs, which the "
                "CPU does not have; use default or max-autotune-no-cudagraphs"
            )
        if missing := missing_compiler():
            problems.append(
                f"compile: no C++ compiler ({missing}) is on the PATH; "
                "install one, set CXX to it, or leave compile out"
            )
        return problems

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: RankKind) -> CostChange | None:
        """A graph takes the non-linearity of the gate again rather than keep it."""
        in_graph = self.config.regions == "layer" or layout.tp == 1
        dense = tuple(layer for layer in rank.layers if layer not in rank.moe_layers)
        if not dense or not in_graph or not config.model.gated_linear_unit:
            return None
        again = KeptChange(tensors=("mlp.activated",), layers=dense, place=Place.NOWHERE)
        return CostChange(kept=(again,))

    @hookimpl
    def ascend_layer(self) -> c.Wrapper[nn.Module]:
        return self._layers().compile_layer

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, c.Metrics]:
        return {"compile": lambda context: self._layers().readings()}

    def _layers(self) -> LayerCompiler:
        if self._compiler is None:
            from .layers import LayerCompiler

            self._compiler = LayerCompiler(self.config)
        return self._compiler
