"""The selection of experts, token by token."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.experts.routing import routing_scores, sparse_mixer

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def test_the_one_sigmoid_weight_of_topk_1_is_not_normalised() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    weights, chosen = routing_scores(logits, 1, "sigmoid", False)
    assert chosen.tolist() == [[2]]
    torch.testing.assert_close(weights, logits[:, 2:].sigmoid(), **EXACT)


@pytest.mark.parametrize(("score", "best"), [("softmax", 1), ("sigmoid", 2)])
def test_experts_are_selected_by_score_and_bias_within_the_best_groups(
    score: str, best: int
) -> None:
    """Three of nine experts in two of three groups; the weights do not depend on the bias."""
    logits = torch.randn(50, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    bias = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) / 10
    weights, chosen = routing_scores(logits, 3, score, True, groups=(3, 2), bias_X=bias)
    unbiased = routing_scores(logits, 3, score, True, groups=(3, 2))[1]
    ungrouped = routing_scores(logits, 3, score, True, bias_X=bias)[1]
    for token, row in enumerate(logits):
        plain = row.exp() / row.exp().sum() if score == "softmax" else 1 / (1 + (-row).exp())
        ranks = (plain + bias).tolist()
        groups = [range(first, first + 3) for first in (0, 3, 6)]
        groups.sort(key=lambda group: -sum(sorted(ranks[x] for x in group)[-best:]))
        allowed = sorted((*groups[0], *groups[1]), key=lambda x: -ranks[x])[:3]
        assert chosen[token].tolist() == allowed
        wanted = plain[allowed] if score == "softmax" else plain[allowed] / plain[allowed].sum()
        torch.testing.assert_close(weights[token], wanted, **EXACT)
    assert not torch.equal(chosen, unbiased)
    assert not torch.equal(chosen, ungrouped)


@pytest.mark.parametrize("eps", [0.01, 0.3])
def test_sparse_mixer_weighs_each_expert_among_those_near_the_best(eps: float) -> None:
    """Token by token from the paper's description, with the gradient of the weights."""
    logits = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    logits.requires_grad_()
    weights, chosen = sparse_mixer(logits, 2, eps)
    rows, counts = [], set()
    for token, row in enumerate(logits):
        values = row.tolist()
        left = sorted(range(6), key=lambda expert: -values[expert])
        assert chosen[token].tolist() == left[:2]
        for place in range(2):
            best = values[left[place]]
            near = [
                x for x in left[place:] if best - values[x] <= 2 * eps * max(abs(values[x]), best)
            ]
            counts.add(len(near))
            rows.append(row[left[place]].exp() / row[near].exp().sum())
    assert len(counts) > 1
    wanted = torch.stack(rows).view(40, 2)
    torch.testing.assert_close(weights, wanted, **EXACT)
    factors = torch.linspace(0.5, 2.0, 80, dtype=torch.float64).view(40, 2)
    ours, plain = (torch.autograd.grad((w * factors).sum(), logits)[0] for w in (weights, wanted))
    assert plain.any()
    torch.testing.assert_close(ours, plain, **EXACT)
