"""How many of a rank's tokens an expert takes (``moe_expert_capacity_factor``). No torch."""

from __future__ import annotations

import math

from ascend_run.types.config import FieldSection


def expert_capacity(num_tokens: int, num_experts: int, topk: int, factor: float) -> int:
    """Return the largest number of a rank's tokens that one expert takes, at most all of them.

    Args:
        factor: Multiple of the mean number of selections of an expert.
    """
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def dispatched_rows(model: FieldSection, num_tokens: int) -> int:
    """Return the number of a rank's rows that are dispatched to experts with balanced routing.

    Padded experts take their capacity from every rank.
    """
    rows: int = num_tokens * model.moe_router_topk
    factor, experts = model.moe_expert_capacity_factor, model.num_moe_experts
    if not factor:
        return rows
    full: int = experts * expert_capacity(num_tokens, experts, model.moe_router_topk, factor)
    return full if model.moe_pad_expert_input_to_capacity else min(rows, full)
