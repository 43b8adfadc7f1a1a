"""Saved activations and working memory of the grouped GEMMs. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    CostChange,
    FieldSection,
    Phase,
    PipelineStage,
    SavedChange,
    Storage,
    WorkingMemory,
)

_NOT_KEPT: Final = ("experts.product", "experts.weighted")
_BY_ACTIVATION: Final = ("experts.activated", "experts.clamped", "experts.sigmoid")
_BY_AUTOGRAD: Final = ("experts.activation", "experts.weights")


def grouped_cost(rank: PipelineStage, *, gated: bool, swiglu: bool) -> CostChange:
    """Return the changes in saved activations and working memory.

    Saved are the tokens, the output of the first GEMM and, for SwiGLU, the activation of the gate;
    in backward, the intermediates of all experts exist at once.

    Args:
        gated: Whether the first GEMM has a gate.
        swiglu: Whether the activation is SwiGLU, whose backward is hand-written.
    """
    layer = min(rank.moe_layers)
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[layer]}
    width, tokens = sizes["experts.product"], sizes["experts.input"]
    not_kept = _NOT_KEPT if swiglu else (*_NOT_KEPT, *_BY_ACTIVATION)
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


def is_swiglu(model: FieldSection) -> bool:
    """Return whether the activation is ``silu(gate) * up``, without a clamp or an offset."""
    changed = model.activation_func_clamp_value is not None or model.glu_linear_offset
    return bool(model.gated_linear_unit) and model.activation == "silu" and not changed
