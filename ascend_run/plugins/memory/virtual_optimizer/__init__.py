"""Keep optimizer states in memory of the host that the device addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from ascend_run.ops.transfer.file_folder import problems_of_folder, why_nothing_is_saved
from ascend_run.plugin_api import (
    ANY,
    CostChange,
    Device,
    Layout,
    LegacyFlag,
    Manifest,
    MixedPrecisionOptimizer,
    Numerics,
    PipelineStage,
    PlatformError,
    PlatformOps,
    RunConfig,
    RunContext,
    Storage,
    Support,
    Wrapper,
    hookimpl,
)
from ascend_run.plugins.memory import no_file, warn_that_nothing_is_saved

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ascend_run.ops.memory.host_mapped import HostMapped

_NAME: Final = "virtual-optimizer"
_FOLDER: Final = "plugins.virtual-optimizer.folder"
_GIB: Final = 2**30


def _some_room(instance: object, attribute: attrs.Attribute[Any], value: Sequence[Any]) -> None:
    numbers = [math.inf if size == "all" else size for size in value]
    if not any(numbers) or min(numbers) < 0:
        raise ValueError(
            f"{attribute.name} must have numbers from 0 on or 'all', of which one is not 0, got "
            f"{', '.join(map(str, value)) or 'none'}"
        )


@attrs.frozen(kw_only=True)
class VirtualOptimizerConfig:
    """Options, set by ``plugins.virtual-optimizer.<field>=<value>``."""

    size: tuple[float | Literal["all"], ...] = attrs.field(default=("all",), validator=_some_room)
    """Most of a rank's states that are on the host, in whole tensors: one size for all pipeline
    stages, or one for each; ``all``: every state. Unit: GiB."""
    folder: str | None = None
    """Existing folder on a disk, for memory-mapped files in place of host memory; they have no
    names, so nothing is left there. For the CPU, whose memory is the host's. Default: host
    memory."""


class VirtualOptimizer:
    """Allocate optimizer states on the host, where the operators of the update address them.

    Cost: the update reads and writes these states over the link to the host; nothing is copied to
    the device. Numerics: bitwise neutral, but on an NPU another kernel of AdamW may round
    otherwise. Source: the behaviour of MindSpeed's ``--virtual-optimizer``.
    """

    manifest = Manifest(
        name=_NAME,
        summary="keep optimizer states in host memory that the device's operators address",
        conflicts={
            "swap-optimizer": "it has all states on the host; enable one of them",
            "memory-fragmentation": "states that leave the device leave their pool unused; leave "
            "one out",
        },
        after=("reuse-fp32-param",),  # its buckets are steps of the inner optimizer
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.REAL, "cuda": Support.UNVERIFIED, "npu": Support.ARITHMETIC},
        level=3,  # it takes time: only where memory is short
        legacy_flags=(
            LegacyFlag(flag="--virtual-optimizer", values={ANY: True}),
            LegacyFlag(
                flag="--virtual-optimizer", key="plugins.virtual-optimizer.size", values=None
            ),
        ),
        source="MindSpeed, docs/features/virtual-optimizer.md",
    )
    config_class = VirtualOptimizerConfig

    def __init__(self, config: VirtualOptimizerConfig) -> None:
        self.config = config
        self._ops: PlatformOps | None = None
        self._pp_rank = 0

    @hookimpl
    def ascend_check(self, config: RunConfig, layout: Layout) -> Sequence[str]:
        return [*self._problems(config, layout)]

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: PipelineStage) -> CostChange:
        return CostChange(
            optimizer_storage=Storage.HOST if self.config.folder is None else Storage.FILE,
            optimizer_bytes=self._bytes_of(rank.pp_rank),
            note=self._why_nothing_is_saved(config),
        )

    @hookimpl
    def ascend_fused_operators(self, groups: ProcessGroupCollection) -> Wrapper[PlatformOps]:
        return partial(self._note, pp_rank=groups.pp.rank())

    @hookimpl
    def ascend_mixed_precision_optimizer(
        self, device: Device
    ) -> Wrapper[type[MixedPrecisionOptimizer]]:
        memory = self._memory(device)
        from .optimizer import Room, virtual

        return partial(
            virtual,
            device=device,
            memory=memory,
            room=Room(self._bytes_of(self._pp_rank)),
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        from .refusal import refuse_other_optimizers

        for model in context.models.values():
            refuse_other_optimizers(model.optimizer)
        warn_that_nothing_is_saved(_NAME, self._why_nothing_is_saved(context.config))

    def _problems(self, config: RunConfig, layout: Layout) -> Iterator[str]:
        size = self.config.size
        if len(size) not in (1, layout.pp):
            yield (
                f"virtual-optimizer: plugins.virtual-optimizer.size has {len(size)} sizes, and the "
                f"pipeline {layout.pp} stages; give one size for all of them, or one for each"
            )
        yield from problems_of_folder(_NAME, self.config.folder, config.platform)

    def _why_nothing_is_saved(self, config: RunConfig) -> str:
        return why_nothing_is_saved(config.platform, _FOLDER, self.config.folder)

    def _bytes_of(self, pp_rank: int) -> float:
        """Return the most bytes of states that a rank of a pipeline stage has on the host."""
        sizes = self.config.size
        size = sizes[pp_rank] if len(sizes) > 1 else sizes[0]
        return math.inf if isinstance(size, str) else size * _GIB

    def _note(self, ops: PlatformOps, pp_rank: int) -> PlatformOps:
        """Note the platform's operators, before there is an optimizer; change none."""
        self._ops, self._pp_rank = ops, pp_rank
        return ops

    def _memory(self, device: Device) -> HostMapped:
        from ascend_run.ops.memory.host_mapped import FileMapped, HostMapped

        folder = self.config.folder
        if folder is not None:
            return FileMapped(folder, partial(no_file, _NAME, folder))
        form = HostMapped if self._ops is None else self._ops.form(HostMapped)
        if form is HostMapped and device.name != "cpu":
            raise PlatformError(
                f"virtual-optimizer: platform {device.name} has no memory of the host that its "
                "operators address; use swap-optimizer"
            )
        return form(device.torch_device)
