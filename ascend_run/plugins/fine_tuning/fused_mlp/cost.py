"""Activations and collectives of fused MLPs. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ascend_run.ops.linear.linear_communication import of_adapters
from ascend_run.plugin_api import (
    Communication,
    CostChange,
    Phase,
    SavedChange,
    Storage,
    WorkingMemory,
)

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig

_OVERLAPPED_BY: Final = "cc-lora"
"""The plugin that counts the collectives of all adapters."""
_AGAIN: Final = ("mlp.activated", "mlp.clamped", "mlp.sigmoid", "mlp.product")
"""What an activation saves besides its input; last what it returns."""


def cost_change(config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
    """Return what MLPs with adapters no longer save, and the collectives of these adapters, all
    overlapped.

    Of a layer's MLP, with T tokens, F inputs of fc2 on this rank and H numbers of a token that fc1
    reads, T H + 2 T F numbers are saved instead of T H + 4 T F, and the outputs of both A.
    """
    layers = tuple(
        layer
        for layer in rank.layers
        if layer not in rank.moe_layers and layer < config.model.num_layers
    )
    if not layers:
        return CostChange()
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[layers[0]]}
    overlapped = () if _OVERLAPPED_BY in config.plugins else of_adapters("mlp")
    return CostChange(
        saved=(SavedChange(tensors=_AGAIN, layers=layers, storage=Storage.NONE),),
        working=tuple(
            WorkingMemory(
                part=f"mlp.{step}",
                name="activation, again",
                nbytes=sum(sizes.get(key, 0.0) for key in again),
                phase=Phase.BACKWARD,
            )
            for step, again in (("fc2", _AGAIN), ("activation", _AGAIN[:-1]))
        ),
        communication=tuple(Communication(**change) for change in overlapped)
        if layout.tp > 1
        else (),
    )
