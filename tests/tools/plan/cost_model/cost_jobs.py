"""What a rank of the pool does for the tests of the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ascend_run.testing.runtime import Trial, run_trial
from tests.support.small_runs import training


def count_flops(trial: Trial) -> tuple[int, int]:
    """FLOPs of a trial's matmuls with weights, and of its attention as if nothing were masked."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value) * 5 // 2  # five matmuls for two

    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        run_trial(trial)
    counts = counter.get_flop_counts()["Global"]
    masked = sum(counts.get(operation, 0) for operation in attention)
    return counter.get_total_flops() - masked, masked


def built_and_counted(values: Mapping[str, Any]) -> tuple[list[str], Counter[str]]:
    """Names of a built model's parameters, and the keys of those that its cost counts."""
    from ascend_run.tools.plan.cost_model.estimate import expected_costs

    with training(values) as run:
        names = [shard.name for shard in run.dry_run.shards(lambda tensor: tensor)]
        context = run.context
        (cost,) = expected_costs(context.config, context.layout, run.hooks)
        return names, Counter(parameter.key for parameter in cost.rank.parameters)
