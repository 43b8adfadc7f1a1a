"""Which tokens an expert keeps, from the definition and how many it takes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.capacity import dispatched_rows, expert_capacity
from ascend_run.ops.experts.routing import routing_scores
from ascend_run.ops.experts.token_dropping import TokenDropping

T, X, K = 9, 4, 2


def routed(seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(T, X, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return routing_scores(logits, K, "softmax", True)


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "factor", "expected"),
    [(9, 4, 2, 0.6, 3), (64, 8, 3, 1.0, 24), (1, 128, 8, 0.3, 1), (9, 4, 2, 50.0, 9)],
)
def test_capacity_is_rounded_up_and_at_most_all_tokens(
    tokens: int, experts: int, topk: int, factor: float, expected: int
) -> None:
    assert expert_capacity(tokens, experts, topk, factor) == expected


@pytest.mark.parametrize(("factor", "pads", "expected"), [(0.6, False, 12), (3.0, True, 36)])
def test_rows_of_a_rank_follow_the_capacity(factor: float, pads: bool, expected: int) -> None:
    """Of nine tokens with two of four experts each; without padding, never more than theirs."""
    model: Any = SimpleNamespace(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_expert_capacity_factor=factor,
        moe_pad_expert_input_to_capacity=pads,
    )
    assert dispatched_rows(model, 9) == expected
    model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity = 3.0, False
    assert dispatched_rows(model, 9) == 18
    model.moe_expert_capacity_factor = None
    assert dispatched_rows(model, 9) == 18


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_an_expert_keeps_its_first_or_heaviest_tokens(policy: str, equal: bool, pads: bool) -> None:
    probs, selected = routed(1)
    if equal:
        probs = selected * 0.5
    weights, routing_map = TokenDropping(K, 0.7, policy, pads=pads)(probs, selected)
    capacity = math.ceil(T * K / X * 0.7)
    for expert in range(X):
        mine = [token for token in range(T) if selected[token, expert]]
        if policy == "probs":
            mine.sort(key=lambda token, e=expert: (-float(probs[token, e]), token))
        kept = mine[:capacity]
        others = [token for token in range(T) if not selected[token, expert]]
        taken = kept + others[: capacity - len(kept) if pads else 0]
        assert routing_map[:, expert].nonzero().flatten().tolist() == sorted(taken)
        assert weights[:, expert].nonzero().flatten().tolist() == sorted(kept)
        assert torch.equal(weights[kept, expert], probs[kept, expert])


def test_a_selected_token_of_weight_zero_comes_before_an_added_one() -> None:
    selected = torch.tensor([[False, True], [False, True], [True, False], [False, True]])
    probs = torch.zeros(4, 2)
    _, routing_map = TokenDropping(1, 0.5, "probs", pads=True)(probs, selected)
    assert routing_map.tolist() == [[False, True], [False, False], [True, False], [False, False]]


def test_no_tokens_leave_an_empty_map() -> None:
    empty = torch.zeros(0, 3)
    weights, routing_map = TokenDropping(1, 1.0, "probs", pads=True)(empty, empty.bool())
    assert weights.shape == routing_map.shape == (0, 3)
