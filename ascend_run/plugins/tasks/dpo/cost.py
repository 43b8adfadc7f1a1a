"""Cost of the reference model. No torch."""

from __future__ import annotations

from ascend_run.ops.attention.score_blocks import pairs_seen
from ascend_run.plugin_api import CostChange, Layout, PipelineStage, RunConfig


def reference_cost(
    config: RunConfig, layout: Layout, rank: PipelineStage, *, is_model: bool
) -> CostChange:
    """Return the cost of a second model that runs forward only: its weights, and two FLOPs for each
    weight and token, and four for each query-key pair and channel.

    Experts are taken as balanced, and attention as over full sequences, as for the policy.

    Args:
        is_model: Whether it has weights of its own.
    """
    model = config.model
    passes = rank.num_microbatches * rank.tokens
    flops = 0.0
    for parameter in rank.parameters:
        if parameter.is_matrix:
            share = 1.0
            if parameter.is_expert:
                share = model.moe_router_topk * layout.ep / model.num_moe_experts
            flops += 2.0 * parameter.numel * passes * share
    heads = config.train.micro_batch_size * rank.heads / layout.cp
    pairs = pairs_seen(config.data.seq_length, model.window_size)
    flops += rank.layer_passes * heads * 4 * rank.head_width * pairs
    weights = rank.item_bytes * sum(parameter.numel for parameter in rank.parameters)
    return CostChange(flops=flops, buffers={"reference weights": weights} if is_model else {})
