"""Memory and communication of replicas. No torch."""

from __future__ import annotations

from ascend_run.ops.experts.dispatcher_cost import saved_indices
from ascend_run.plugin_api import (
    Communication,
    CostChange,
    Layout,
    Phase,
    PipelineStage,
    RunConfig,
    SavedTensor,
    WorkingMemory,
)


def replica_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, num_hot: int
) -> CostChange | None:
    """Return the change by a replica of some experts in each layer with experts; None without."""
    indices = saved_indices(config, layout, rank)
    if indices is None:
        return None
    layers = tuple(sorted(rank.moe_layers))
    weights = [p for p in rank.parameters if p.part == "experts" and p.layer == layers[0]]
    own = sum(weight.numel for weight in weights) * rank.item_bytes
    local = (config.model.num_moe_experts or 0) // layout.ep
    replicas = own / local * num_hot
    runs = len(layers) * rank.num_microbatches
    return CostChange(
        saved=indices.saved,
        saved_added=(SavedTensor(part="experts", name="replicas", nbytes=replicas),),
        saved_added_layers=layers,
        working=(
            WorkingMemory(
                part="experts",
                name="gradients of replicas",
                nbytes=replicas + own,  # and, on an owner, a tensor of all its experts
                phase=Phase.BACKWARD,
            ),
        ),
        communication=tuple(
            Communication(
                operation=operation,
                group="ep",
                calls=runs * num_hot * len(weights),
                sent_bytes=runs * replicas,
                why=f"experts, {what}",
                overlapped=True,
            )
            for operation, what in (
                ("broadcast", "forward: replicas"),
                ("reduce", "backward: gradients of replicas"),
            )
        ),
    )
