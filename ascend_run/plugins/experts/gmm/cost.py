"""Saved activations and working memory of the grouped GEMMs. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    CostChange,
    Phase,
    PipelineStage,
    SavedChange,
    Storage,
    WorkingMemory,
)

_NOT_KEPT: Final = ("experts.product", "experts.weighted")
_BY_AUTOGRAD: Final = ("experts.activation", "experts.weights")


def grouped_cost(rank: PipelineStage, *, gated: bool, is_silu: bool) -> CostChange:
    """Return the changes in saved activations and working memory.

    Saved are the tokens, the output of the first GEMM and, for SwiGLU, the activation of the gate;
    in backward, the intermediates of all experts exist at once.

    Args:
        gated: Whether the first GEMM has a gate.
        is_silu: Whether the activation is SiLU, whose backward is hand-written.
    """
    layer = min(rank.moe_layers)
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[layer]}
    width, tokens = sizes["experts.product"], sizes["experts.input"]
    not_kept = _NOT_KEPT if gated and is_silu else (*_NOT_KEPT, "experts.activated")
    rows = 2 if gated else 1
    # Incoming gradient, gradient of fc2's input, that input recomputed, gradient of fc1's output.
    held = tokens + width * (2 + rows)
    return CostChange(
        saved=(SavedChange(tensors=not_kept, storage=Storage.NONE),),
        working=(
            WorkingMemory(part="experts", name="intermediates", nbytes=held, phase=Phase.BACKWARD),
        ),
        working_removed=_BY_AUTOGRAD,
    )
