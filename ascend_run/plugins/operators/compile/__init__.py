"""torch.compile for layers: fuse the elementwise operations between matmuls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.kernels.compilers import missing_compiler
from ascend_run.plugin_api import (
    CostChange,
    Layout,
    LinkPlace,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    RunConfig,
    SavedChange,
    Storage,
    Support,
    hookimpl,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import contracts as c

    from .layers import LayerCompiler

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_CUDA_GRAPHS: Final = ("reduce-overhead", "max-autotune")
REGIONS: Final = ("layer", "parts")
PARTS: Final = ("input_layernorm", "pre_mlp_layernorm", "mlp")
"""Submodules of a layer, by Megatron's names: the norms and the dense MLP."""
_OUTSIDE: Final = ("core_attention", "linear", "mlp_bda", "moe_layer", "self_attn_bda")
"""Links that keep modules out of graphs, or replace a linear by one that a graph can hold."""


@attrs.frozen(kw_only=True)
class CompileConfig:
    """Options, set by ``plugins.compile.<field>=<value>``."""

    regions: str = attrs.field(default="layer", validator=attrs.validators.in_(REGIONS))
    """What is compiled: ``layer`` (full layers, with the attention kernel between two graphs) or
    ``parts`` (each norm and each dense MLP on its own; the rest of the layer is not compiled)."""
    mode: str = attrs.field(default="default", validator=attrs.validators.in_(MODES))
    """Mode of torch.compile: how long it may search, and whether it records CUDA graphs."""
    dynamic: str = attrs.field(
        default="auto", validator=attrs.validators.in_(("auto", "yes", "no"))
    )
    """Graphs with dynamic shapes: from the second shape on (``auto``), at once, or never."""
    fullgraph: bool = False
    """Raise an error on a graph break, instead of falling back to eager code."""
    max_graphs: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Graphs per compiled function; further variants run without being compiled."""


class Compile:
    """Run layers as compiled graphs; attention kernels, experts and collectives are not compiled.

    Cost: the first step takes seconds longer for each variant of a layer; a dense layer does not
    save the activation of its gate. Numerics: a chain of elementwise operations is rounded once
    instead of after each operation. Source: torch.compile, doi:10.1145/3620665.3640366.

    The plugin stores nothing on disk. torch's own cache is keyed by the compiled source and does
    not checksum its files; ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` disables it.
    """

    manifest = Manifest(
        name="compile",
        summary="compile layers with torch.compile, fusing elementwise operations",
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL},
        level=2,
        forward_links=dict.fromkeys((*_OUTSIDE, "layer", *PARTS), LinkPlace.COMPILER),
        maturity=Maturity.BETA,
        source="torch.compile, doi:10.1145/3620665.3640366",
    )
    config_class = CompileConfig

    def __init__(self, config: CompileConfig) -> None:
        self.config = config
        compiled = ("layer",) if config.regions == "layer" else PARTS
        links = dict.fromkeys((*_OUTSIDE, *compiled), LinkPlace.COMPILER)
        self.manifest = attrs.evolve(self.manifest, forward_links=links)
        self._compiler: LayerCompiler | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problems = []
        if self.config.fullgraph and self.config.regions != "parts":
            problems.append(
                "compile: plugins.compile.fullgraph=true needs one graph, but a layer has two, "
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
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the activations of gates, which graphs recompute instead of saving."""
        in_graph = self.config.regions == "layer" or layout.tp == 1
        dense = tuple(layer for layer in rank.layers if layer not in rank.moe_layers)
        if not dense or not in_graph or not config.model.gated_linear_unit:
            return None
        again = SavedChange(tensors=("mlp.activated",), layers=dense, storage=Storage.NONE)
        return CostChange(saved=(again,))

    @hookimpl
    def ascend_layer(self) -> c.ModuleWrapper:
        return self._layers().links

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, c.Metrics]:
        return {"compile": lambda context: self._layers().readings()}

    def _layers(self) -> LayerCompiler:
        if self._compiler is None:
            from .layers import LayerCompiler

            self._compiler = LayerCompiler(self.config)
        return self._compiler
