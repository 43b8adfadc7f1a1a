"""Offload the activations that attention saves for backward to the host, and prefetch them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.transfer.file_folder import problems_of_folder, why_nothing_is_saved
from ascend_run.plugin_api import (
    ActivationTreatment,
    CostChange,
    Device,
    ForwardLink,
    HostCopier,
    Keeping,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Metrics,
    Numerics,
    ReportPanel,
    RunConfig,
    RunContext,
    SavedChange,
    Storage,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import (
    is_among_first,
    no_file,
    recomputed,
    some_of,
    warn_that_nothing_is_saved,
)

if TYPE_CHECKING:
    from torch import nn

    from ascend_run.ops.swapping.swapper import Swapper


_NAME: Final = "swap-attention"
_FOLDER: Final = "plugins.swap-attention.folder"
MODULES: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm")
"""Submodules of a layer, by Megatron's names, in execution order."""
_PARTS: Final = dict(zip(MODULES, ("input_norm", "self_attention", "mlp_norm"), strict=True))
"""Module -> its part in the cost model."""


@attrs.frozen(kw_only=True)
class SwapAttentionConfig:
    """Options, set by ``plugins.swap-attention.<field>=<value>``."""

    modules: tuple[str, ...] = attrs.field(default=("self_attention",), validator=some_of(MODULES))
    """Submodules of every layer whose saved tensors are offloaded: ``input_layernorm``,
    ``self_attention``, ``pre_mlp_layernorm``."""

    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors with a smaller storage stay on the device. Unit: bytes."""
    prefetch: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How many layers ahead of its backward a layer is prefetched; 0 disables prefetching, so every
    layer waits for its copy. Unit: layers."""
    recompute_mlp_layers: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Number of layers per rank whose MLP (dense or experts) is recomputed in backward instead of
    saved: the first of every chunk, then the second of every chunk. Unit: layers."""
    folder: str | None = None
    """Existing folder on a disk, for memory-mapped files in place of host memory; they have no
    names, so nothing is left there. For the CPU, whose memory is the host's; copies then are not
    overlapped. Default: host memory."""


class SwapAttention:
    """Keep what the attention of every layer saves for backward in host memory.

    Cost: each offloaded byte is copied twice, overlapped with the computation if the device
    supports it. Numerics: bitwise neutral. Source: the swap of MindSpeed's ``--swap-attention``;
    PyTorch's saved-tensor hooks.
    """

    manifest = Manifest(
        name=_NAME,
        summary="offload the saved activations of attention to the host",
        forward_links=dict.fromkeys(MODULES, LinkPlace.AROUND),
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
        links = dict.fromkeys(config.modules, LinkPlace.AROUND)
        self.manifest = attrs.evolve(self.manifest, forward_links=links)
        self._swapper: Swapper | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return [*problems_of_folder(_NAME, self.config.folder, config.platform)]

    @hookimpl
    def ascend_cost(self, config: RunConfig) -> CostChange:
        """Return the activations that are offloaded."""
        swapped = SavedChange(
            tensors=tuple(f"{_PARTS[name]}.*" for name in self.config.modules),
            storage=Storage.HOST if self.config.folder is None else Storage.FILE,
            at_least=self.config.min_bytes,
            ahead=self.config.prefetch,
        )
        return CostChange(saved=(swapped,), note=self._why_nothing_is_saved(config))

    @hookimpl
    def ascend_activation_policy(
        self, place: int, chunk: int, num_chunks: int
    ) -> Mapping[str, ActivationTreatment]:
        swapped = ActivationTreatment(Keeping.OFFLOAD, partial(self._links, (chunk, place)))
        policy = dict.fromkeys(self.config.modules, swapped)
        if is_among_first(self.config.recompute_mlp_layers, place, chunk, num_chunks):
            policy["mlp"] = recomputed()
        return policy

    def _links(
        self, index: tuple[int, int], layer: nn.Module, parts: Sequence[str], device: Device
    ) -> Mapping[str, ForwardLink]:
        if self._swapper is None:
            self._swapper = self._make_swapper(device)
        names = [name for name in MODULES if name in parts]
        links = self._swapper.links([getattr(layer, name) for name in names], index)
        return dict(zip(names, links, strict=True))

    def _make_swapper(self, device: Device) -> Swapper:
        from ascend_run.ops.swapping.swapper import Swapper
        from ascend_run.ops.transfer.file_copier import FileCopier

        options = self.config
        copier: HostCopier = device.host_copier()
        if options.folder is not None:
            copier = FileCopier(options.folder, partial(no_file, _NAME, options.folder))
        return Swapper(
            device.torch_device, copier, min_bytes=options.min_bytes, prefetch=options.prefetch
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        warn_that_nothing_is_saved(_NAME, self._why_nothing_is_saved(context.config))

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

    def _why_nothing_is_saved(self, config: RunConfig) -> str:
        return why_nothing_is_saved(config.platform, _FOLDER, self.config.folder)

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Return the bytes offloaded in the last step, and the number of late prefetches."""
        swapper = self._swapper
        return {
            "swap_bytes": 0.0 if swapper is None else float(swapper.swapped_bytes),
            "late_fetches": 0.0 if swapper is None else float(swapper.late_fetches),
        }
