"""Swap what attention keeps for backward to the host, and bring it back in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    Claim,
    Device,
    Manifest,
    Metrics,
    Numerics,
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


@attrs.frozen(kw_only=True)
class SwapAttentionConfig:
    """Options, set by ``plugins.swap-attention.<field>=<value>``."""

    min_bytes: int = attrs.field(default=1 << 20, validator=attrs.validators.ge(1))
    """Tensors in a smaller storage stay where they are. Unit: bytes."""
    prefetch: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How far ahead of its backward a layer is brought back; 0 waits for every layer.
    Unit: layers."""


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
            "npu": Support.UNVERIFIED,
        },
        level=2,
        legacy_flags=("--swap-attention",),
        source="MindSpeed, docs/features/swap_attention.md",
    )
    config_class = SwapAttentionConfig

    def __init__(self, config: SwapAttentionConfig) -> None:
        self.config = config
        self._swapper: Swapper | None = None

    @hookimpl
    def ascend_check(self, config: RunConfig) -> Sequence[str]:
        problems = []
        if config.model.get("recompute_granularity") == "full":
            problems.append(
                "swap-attention: model.recompute_granularity=full keeps nothing of the attention "
                "that could be swapped; use selective recomputation, or leave swap-attention out"
            )
        return problems

    @hookimpl
    def ascend_self_attention(self, device: Device, layer_index: int) -> Wrapper[nn.Module]:
        from .swapper import Swapper

        if self._swapper is None:
            self._swapper = Swapper(
                device, min_bytes=self.config.min_bytes, prefetch=self.config.prefetch
            )
        swapper = self._swapper
        return lambda module: swapper.wrap(module, layer_index)

    @hookimpl
    def ascend_before_step(self) -> None:
        if self._swapper is not None:
            self._swapper.swapped_bytes = 0

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, Metrics]:
        return {"swap-attention": self._readings}

    @hookimpl
    def ascend_report(self) -> Sequence[ReportPanel]:
        metrics = ("swap-attention/swap_bytes",)
        return [ReportPanel(title="Swapped activations", metrics=metrics, unit="bytes")]

    def _readings(self, context: RunContext) -> Mapping[str, float]:
        """Bytes that this rank sent to the host in the last step."""
        swapped = 0 if self._swapper is None else self._swapper.swapped_bytes
        return {"swap_bytes": float(swapped)}
