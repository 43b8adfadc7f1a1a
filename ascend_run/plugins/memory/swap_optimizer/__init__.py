"""Keep the optimizer's states and the master weights on the host between steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs

from ascend_run.ops.transfer.file_folder import problems_of_folder, why_nothing_is_saved
from ascend_run.plugin_api import (
    CostChange,
    Device,
    HostCopier,
    Layout,
    LegacyFlag,
    Manifest,
    MixedPrecisionOptimizer,
    Numerics,
    PipelineStage,
    RunConfig,
    RunContext,
    Storage,
    Support,
    Wrapper,
    hookimpl,
)
from ascend_run.plugins.memory import no_file, warn_that_nothing_is_saved

from .buckets import OVERLAPPED, elements_at_once

_NAME: Final = "swap-optimizer"
_FOLDER: Final = "plugins.swap-optimizer.folder"


@attrs.frozen(kw_only=True)
class SwapOptimizerConfig:
    """Options, set by ``plugins.swap-optimizer.<field>=<value>``."""

    bucket_size: int = attrs.field(default=4_194_304, validator=attrs.validators.ge(1))
    """Parameters whose states are copied to the device and updated together; at least those of one
    tensor. Unit: elements."""
    folder: str | None = None
    """Existing folder on a disk, for memory-mapped files in place of host memory; they have no
    names, so nothing is left there. For the CPU, whose memory is the host's; copies then are not
    overlapped, and one bucket is there at a time. Default: host memory."""


class SwapOptimizer:
    """Copy optimizer states to the device bucket by bucket, in the optimizer step only.

    Cost: each byte of the states and master weights is copied to the device and back in every step,
    overlapped with the update of other buckets if the device supports it. Numerics: bitwise
    neutral. Source: the behaviour of MindSpeed's ``--swap-optimizer``.
    """

    manifest = Manifest(
        name=_NAME,
        summary="keep optimizer states and master weights on the host between steps",
        conflicts={
            "reuse-fp32-param": "it keeps half of each master weight in the model's weight, which "
            "stays on the device; enable one of them"
        },
        small_model_settings={"bucket_size": 1000},
        numerics=Numerics.BITWISE,
        platforms={"cpu": Support.REAL, "cuda": Support.REAL, "npu": Support.UNVERIFIED},
        level=3,  # it takes time: only where memory is short
        legacy_flags=(LegacyFlag(flag="--swap-optimizer"),),
        source="MindSpeed, docs/features/swap-optimizer.md",
    )
    config_class = SwapOptimizerConfig

    def __init__(self, config: SwapOptimizerConfig) -> None:
        self.config = config

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        return [*problems_of_folder(_NAME, self.config.folder, config.platform)]

    @hookimpl
    def ascend_cost(self, config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
        options = self.config
        overlaps = options.folder is None
        at_once = OVERLAPPED if overlaps else 1
        return CostChange(
            optimizer_storage=Storage.HOST if overlaps else Storage.FILE,
            optimizer_elements=elements_at_once(config, layout, rank, options.bucket_size, at_once),
            note=self._why_nothing_is_saved(config),
        )

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        warn_that_nothing_is_saved(_NAME, self._why_nothing_is_saved(context.config))

    @hookimpl
    def ascend_mixed_precision_optimizer(
        self, device: Device
    ) -> Wrapper[type[MixedPrecisionOptimizer]]:
        from ascend_run.ops.transfer.file_copier import FileCopier

        from .optimizer import swapping

        folder = self.config.folder
        copier: HostCopier = (
            device.host_copier()
            if folder is None
            else FileCopier(folder, partial(no_file, _NAME, folder))
        )
        return partial(
            swapping,
            device=device,
            copier=copier,
            overlaps=folder is None,
            bucket_size=self.config.bucket_size,
        )

    def _why_nothing_is_saved(self, config: RunConfig) -> str:
        return why_nothing_is_saved(config.platform, _FOLDER, self.config.folder)
