"""Attention masks built once, for all layers and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import attrs

from ascend_run.plugin_api import (
    AttentionKernel,
    CostChange,
    LegacyFlag,
    Manifest,
    Maturity,
    Numerics,
    PipelineStage,
    PlatformOps,
    RunConfig,
    Support,
    Wrapper,
    hookimpl,
)

from .cost import bands_bytes, whole_bytes

if TYPE_CHECKING:
    from ascend_run.ops.attention.shared_bands import SharedBands

COMPRESSING: Final = ("npu",)
"""Platforms whose operator reads a triangular mask of fixed size for a mask of any size."""
BANDING: Final = ("cpu", "cuda")
"""Platforms whose kernels take a band as a bias that is added to the scores."""


@attrs.frozen(kw_only=True)
class GenerateMaskConfig:
    """Options, set by ``plugins.generate-mask.<field>=<value>``."""

    form: Literal["compressed", "whole"] = "compressed"
    """On the npu: one triangular mask of 4 MiB for every call, or a full mask for each call
    shape."""


class GenerateMask:
    """Build each attention mask once and share it between layers and micro-batches.

    Cost: memory does not grow with layers, micro-batches or, when compressed, with the sequence.
    Source: the behaviour of MindSpeed's mask normalisation.
    """

    manifest = Manifest(
        name="generate-mask",
        summary="create attention masks once, for all layers and micro-batches",
        small_model_settings={"model.window_size": [5, 0]},
        exercised_by=(
            "set model.window_size: without a window, no kernel of this platform needs a mask"
        ),
        numerics=Numerics.BITWISE,
        platforms={
            "cpu": Support.REAL,
            "cuda": Support.REAL,
            "npu": Support.ARITHMETIC,
        },
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        legacy_flags=(
            LegacyFlag(
                flag="--no-create-attention-mask-in-dataloader", values={"": False, None: True}
            ),
            LegacyFlag(
                flag="--sparse-mode",
                key="plugins.generate-mask.form",
                values={"0": "whole", "2": "compressed"},
            ),
        ),
        source="MindSpeed's mask normalisation",
    )
    config_class = GenerateMaskConfig

    def __init__(self, config: GenerateMaskConfig) -> None:
        self.config = config
        self.masks: SharedBands | None = None
        """The shared masks, on platforms that take bands."""

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        platform, form = config.platform, self.config.form
        problem = ""
        if platform not in (*COMPRESSING, *BANDING):
            problem = f"platform {platform} is not supported"
        elif form == "whole" and platform not in COMPRESSING:
            problem = (
                f"plugins.generate-mask.form={form}: no kernel of platform {platform} takes "
                "full masks"
            )
        return [f"generate-mask: {problem}; leave it out"] if problem else []

    @hookimpl
    def ascend_cost(self, config: RunConfig, rank: PipelineStage) -> CostChange | None:
        """Return the mask buffers; the npu holds its triangular mask without the plugin too."""
        if config.platform in BANDING:
            held = bands_bytes(config, rank)
        else:
            held = whole_bytes(config) if self.config.form == "whole" else 0.0
        return CostChange(buffers={"attention masks": held}) if held else None

    @hookimpl
    def ascend_fused_operators(self, config: RunConfig) -> Wrapper[PlatformOps]:
        given = self._masks(config.platform)

        def share(ops: PlatformOps) -> PlatformOps:
            kernels: Mapping[str, Callable[..., AttentionKernel]] = {
                name: partial(build, masks=given) for name, build in ops.attention_kernels.items()
            }
            return attrs.evolve(ops, attention_kernels=kernels)

        return share

    def _masks(self, platform: str) -> SharedBands | str:
        if platform in COMPRESSING:
            return self.config.form
        if self.masks is None:
            from ascend_run.ops.attention.shared_bands import SharedBands

            self.masks = SharedBands()
        return self.masks
