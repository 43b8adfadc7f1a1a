"""The activation of the MLPs. Torch-free."""

from __future__ import annotations

from ascend_run.types.config import FieldSection


def is_swiglu(model: FieldSection) -> bool:
    """Return whether it is ``silu(gate) * up``, for which platforms have fused operators."""
    changed = model.activation_func_clamp_value is not None or model.glu_linear_offset
    return bool(model.gated_linear_unit) and model.activation == "silu" and not changed
