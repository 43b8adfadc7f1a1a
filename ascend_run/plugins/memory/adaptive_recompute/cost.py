"""What is expected of memory, where the choice is not known yet. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ascend_run.plugin_api import (
    CostChange,
    Layout,
    PipelineStage,
    RunConfig,
    SavedChange,
    SavedTensor,
)
from ascend_run.plugins.memory import in_flight

from .expected import kept_tensors

_STAY: Final = ("self_attn_bda", "mlp_bda")
"""Parts of the cost model that are in no part of a layer which can be swapped."""
_LEFT_BEHIND: Final = "dropped"
"""So is this tensor of a part."""


def cost_of(
    budget: int,
    swaps_from: int | None,
    config: RunConfig,
    layout: Layout,
    rank: PipelineStage,
    *,
    to_host: bool,
) -> CostChange | None:
    """Return what the budget allows, at least what layers must keep and at most everything.

    Args:
        budget: Unit: bytes.
        swaps_from: Bytes of the smallest tensor that is swapped; None: none is.
        to_host: Whether what is swapped is in host memory.
    """
    layers = [layer for layer in rank.layers if layer in rank.saved]
    if not layers:
        return None
    if swaps_from is None:
        return CostChange(saved=tuple(_by_parts(kept_tensors(budget, config, layout, rank))))
    first = [rank.saved[layer][0] for layer in layers]
    inputs = sum(tensor.nbytes for tensor in first)
    everything = sum(tensor.nbytes for layer in layers for tensor in rank.saved[layer])
    staying = (t for layer in layers for t in rank.saved[layer] if _stays(t, swaps_from))
    least = min(inputs, sum(tensor.nbytes for tensor in staying))
    forwards = in_flight(config, layout, rank)
    kept = max(least, min(everything, budget / forwards))
    share = max(0.0, kept - inputs) / (everything - inputs)
    changes = [SavedChange(tensors=("*",), kept=share)] if share else []
    if kept < inputs:
        keys = {tensor.key for tensor in first}
        changes.append(SavedChange(tensors=(*sorted(keys),), factor=kept / inputs))
    away = forwards * (everything - kept) if to_host else 0.0
    host = {"swapped activations": away} if away else {}
    return CostChange(saved=(*changes,), host_buffers=host)


def _by_parts(kept: Mapping[int, tuple[str, ...]]) -> Iterator[SavedChange]:
    """Yield what is kept by layers that are counted as recomputed whole."""
    for tensors in sorted({*kept.values()}):
        layers = tuple(layer for layer, found in kept.items() if found == tensors)
        if tensors:
            yield SavedChange(tensors=tensors, layers=layers, kept=1.0)


def _stays(tensor: SavedTensor, swaps_from: int) -> bool:
    return tensor.part in _STAY or tensor.name == _LEFT_BEHIND or tensor.nbytes < swaps_from
