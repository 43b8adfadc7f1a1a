"""Memory and communication of experts that exchange their tokens. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.plugin_api import (
    Communication,
    CostChange,
    Layout,
    Phase,
    PipelineStage,
    RunConfig,
    SavedChange,
    SavedTensor,
    Storage,
    WorkingMemory,
)

_INDEX, _WIDE = 8, 4
"""Bytes of an index, two of which a row has, and of its weight."""
_COMPUTED: Final = ("hidden", "activated", "product", "clamped", "sigmoid", "weighted")
_WEIGHTS: Final = (
    ("all_to_all", "ep", "experts, *: weights"),
    ("all_gather", "expt_tp", "experts, forward: weights of one expert"),
    ("reduce_scatter", "expt_tp", "experts, backward: weights of one expert"),
)
"""What is not exchanged: the weights of the rows, and their gradients."""
_OUTPUTS: Final = (
    ("reduce_scatter", "expt_tp", "experts, forward: outputs of one expert"),
    ("all_gather", "expt_tp", "experts, backward: outputs of one expert"),
)
"""What is summed in the run's dtype instead of that of the weights."""


def exchanged_cost(config: RunConfig, layout: Layout, rank: PipelineStage) -> CostChange:
    """Return the change in a rank's layers with experts.

    Saved are the gathered tokens, the output of fc1, and the outputs of this rank's own rows. In
    backward, the gathered gradient of the outputs, and the intermediates of all experts, exist at
    once.
    """
    layers = tuple(sorted(rank.moe_layers))
    sizes = {tensor.key: tensor.nbytes for tensor in rank.saved[layers[0]]}
    tokens, width = sizes["experts.input"], sizes["experts.product"]
    fc1 = width * (2 if config.model.gated_linear_unit else 1)
    own, gathered = (2 * _INDEX + _WIDE * ranks for ranks in (1, layout.expt_tp))
    computed = tuple(f"experts.{name}" for name in _COMPUTED)
    return CostChange(
        saved=(
            SavedChange(tensors=computed, storage=Storage.NONE),
            SavedChange(tensors=("dispatcher.indices",), factor=own / gathered),
        ),
        saved_added=(
            SavedTensor(part="experts", name="fc1_output", nbytes=fc1),
            SavedTensor(part="experts", name="own_outputs", nbytes=tokens / layout.expt_tp),
        ),
        saved_added_layers=layers,
        working=(
            WorkingMemory(
                part="experts",
                name="intermediates",
                # Gradients of outputs and tokens; of the activation, which is recomputed, and fc1.
                nbytes=2 * tokens + 2 * width + fc1,
                phase=Phase.BACKWARD,
            ),
        ),
        working_removed=("experts.activation",),
        communication=(
            *(_replaced(*weights, calls=0.0, sent_bytes=0.0) for weights in _WEIGHTS),
            *(
                _replaced(*outputs, calls=1.0, sent_bytes=rank.item_bytes / _WIDE)
                for outputs in _OUTPUTS
            ),
        ),
    )


def _replaced(
    operation: str, group: str, why: str, *, calls: float, sent_bytes: float
) -> Communication:
    return Communication(
        operation=operation,
        group=group,
        calls=calls,
        sent_bytes=sent_bytes,
        why=why,
        replaces=operation,
    )
