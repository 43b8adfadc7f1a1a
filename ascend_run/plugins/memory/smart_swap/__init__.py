"""Swap saved activations to the host where a profiled step says that computation overlaps the
copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.transfer.file_folder import why_nothing_is_saved
from ascend_run.plugin_api import (
    ActivationTreatment,
    CostChange,
    Device,
    ForwardLink,
    Keeping,
    Layout,
    LegacyFlag,
    LinkPlace,
    Manifest,
    Numerics,
    PipelineStage,
    RunConfig,
    RunContext,
    SavedChange,
    Storage,
    Support,
    hookimpl,
)
from ascend_run.plugins.memory import MIB, in_flight, some_of, warn_that_nothing_is_saved

if TYPE_CHECKING:
    from torch import nn

    from .engine import Engine

_NAME: Final = "smart-swap"
MODULES: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
"""Modules of a layer, by Megatron's names, in execution order."""
_PARTS: Final = dict(zip(MODULES, ("input_norm", "self_attention", "mlp_norm", "mlp"), strict=True))
"""Module -> its part in the cost model."""


@attrs.frozen(kw_only=True)
class SmartSwapConfig:
    """Options, set by ``plugins.smart-swap.<field>=<value>``."""

    activation_mb: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(0.0))
    )
    """What the modules may keep on the device for backward, over all micro-batches in flight, as
    far as copies are overlapped. Default: as little as can be. Unit: MiB."""
    modules: tuple[str, ...] = attrs.field(
        default=("self_attention", "mlp"), validator=some_of(MODULES)
    )
    """Modules of every layer whose saved tensors may be swapped: ``input_layernorm``,
    ``self_attention``, ``pre_mlp_layernorm``, ``mlp`` (not of layers with experts)."""
    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors with a smaller storage stay on the device. Unit: bytes."""
    warmup_steps: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """Steps before the one that is profiled. Unit: steps."""
    bandwidth_gb: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(0.0))
    )
    """Speed of copies to the host, and of copies back. Default: measured. Unit: GB/s."""


class SmartSwap:
    """Profile a step, and from then on move to the host what is copied there and back behind the
    computation.

    Cost: each swapped byte is copied twice, overlapped with the computation if the device supports
    it; the profiled step waits for kernels. Numerics: bitwise neutral. Source: the behaviour of
    MindSpeed's ``--smart-swap``, on PyTorch's saved-tensor hooks in place of the allocator.
    """

    manifest = Manifest(
        name=_NAME,
        summary="swap the activations whose copies a profiled step shows to be overlapped",
        conflicts={
            "adaptive-recompute": "it measures what layers keep, which then is elsewhere; enable "
            "one of them",
            "compile": "compiled graphs depend on the hooks that are active, which change with the "
            "plan; leave one out",
            "recompute-in-bubble": "it treats the activations of whole layers; enable one of them",
            "swap-attention": "both move what layers save, and the plan is for a link without "
            "other copies; enable one of them",
        },
        forward_links=dict.fromkeys(MODULES, LinkPlace.AROUND),
        exercised_by="verify it with higher plugins.smart-swap.bandwidth_gb, lower min_bytes and "
        "plugins.smart-swap.warmup_steps=0",
        small_model_settings={"min_bytes": 1, "warmup_steps": 0, "bandwidth_gb": 1e6},
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.EMULATED,
            "cuda": Support.UNVERIFIED,
            "npu": Support.UNVERIFIED,
        },
        level=3,  # it takes memory of the host
        legacy_flags=(LegacyFlag(flag="--smart-swap"),),
        source="MindSpeed, docs/features/smart_swap.md",
    )
    config_class = SmartSwapConfig

    def __init__(self, config: SmartSwapConfig) -> None:
        self.config = config
        links = dict.fromkeys(config.modules, LinkPlace.AROUND)
        self.manifest = attrs.evolve(self.manifest, forward_links=links)
        self._engine: Engine | None = None

    @hookimpl
    def ascend_activation_policy(self, has_experts: bool) -> Mapping[str, ActivationTreatment]:
        """Return the swapping. What experts save changes with the routing of every step."""
        swapped = ActivationTreatment(Keeping.OFFLOAD, self._links)
        names = (name for name in self.config.modules if not (has_experts and name == "mlp"))
        return dict.fromkeys(names, swapped)

    @hookimpl
    def ascend_cost(
        self, config: RunConfig, layout: Layout, rank: PipelineStage
    ) -> CostChange | None:
        """Return the first layers, until what the others keep is within the budget. The last one
        stays where its backward follows its forward: nothing overlaps its copies."""
        kept = {layer: self._bytes_of(rank, layer) for layer in rank.layers}
        forwards = in_flight(config, layout, rank)
        budget = (self.config.activation_mb or 0.0) * MIB / forwards
        left, moved = sum(kept.values()), list[int]()
        for layer in rank.layers if forwards > 1 else rank.layers[:-1]:
            if left <= budget:
                break
            moved.append(layer)
            left -= kept[layer]
        swapped = SavedChange(
            tensors=self._tensors,
            layers=tuple(moved),
            storage=Storage.HOST,
            at_least=self.config.min_bytes,
            ahead=-1,  # each comes back as late as its copy can begin, one after the other
        )
        note = why_nothing_is_saved(config.platform)
        return CostChange(saved=(swapped,), note=note) if moved else None

    @property
    def _tensors(self) -> tuple[str, ...]:
        return tuple(f"{_PARTS[name]}.*" for name in self.config.modules)

    def _bytes_of(self, rank: PipelineStage, layer: int) -> float:
        """What the modules of a layer save that may be swapped, for one micro-batch."""
        parts = {_PARTS[name] for name in self.config.modules}
        saved = (tensor for tensor in rank.saved.get(layer, ()) if tensor.part in parts)
        return sum(t.nbytes for t in saved if t.nbytes >= self.config.min_bytes)

    def _links(
        self, layer: nn.Module, parts: Sequence[str], device: Device
    ) -> Mapping[str, ForwardLink]:
        if self._engine is None:
            self._engine = self._make_engine(device)
        return self._engine.links(layer, parts)

    def _make_engine(self, device: Device) -> Engine:
        from ascend_run.ops.transfer.swap_plan import Link

        from .engine import Engine

        options = self.config
        speed = None if options.bandwidth_gb is None else options.bandwidth_gb * 1e9
        return Engine(
            device,
            min_bytes=options.min_bytes,
            warmup_steps=options.warmup_steps,
            budget=int((options.activation_mb or 0.0) * MIB),
            link=None if speed is None else Link(to_host=speed, to_device=speed),
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        warn_that_nothing_is_saved(_NAME, why_nothing_is_saved(context.config.platform))

    @hookimpl
    def ascend_before_step(self) -> None:
        if self._engine is not None:
            self._engine.begin_step()

    @hookimpl
    def ascend_after_step(self) -> None:
        if self._engine is not None:
            self._engine.end_step()
