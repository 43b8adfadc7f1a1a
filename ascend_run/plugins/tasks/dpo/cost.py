"""Cost of the reference model. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import CostChange, PipelineStage

_BYTES_OF_TOKEN: Final = 4 * 8 + 4
"""Of a batch: token, label, position and document in int64, and the loss mask in float32."""
_LOG_PROBABILITY: Final = 4
"""Bytes of the reference's, on the last stage."""


def precomputed_cost(*, is_model: bool) -> CostChange:
    """Return the cost of a step whose samples have the reference's log-probabilities."""
    held = ", where the reference stands beside the policy" if is_model else ""
    return CostChange(
        note=f"without the pass of the reference over all pairs before the first step{held}"
    )


def reference_cost(rank: PipelineStage, *, is_model: bool) -> CostChange:
    """Return the cost of a reference that runs forward on all micro-batches of a step before the
    policy does: its weights, the FLOPs of the policy's forwards, and the micro-batches, which wait
    for it on the device.

    Args:
        is_model: Whether it has weights of its own.
    """
    weights = rank.item_bytes * sum(parameter.numel for parameter in rank.parameters)
    of_token = _BYTES_OF_TOKEN + (_LOG_PROBABILITY if rank.is_last else 0)
    waiting = rank.num_microbatches * rank.tokens * of_token
    return CostChange(
        flops=rank.forward_flops,
        buffers={
            **({"reference weights": weights} if is_model else {}),
            "micro-batches of a step": waiting,
        },
        note=(
            f"the reference is {'a second model' if is_model else 'the base of the adapters'}; "
            "without the communication of its forwards"
        ),
    )
