"""The selection of experts, token by token."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.experts.routing import largest, routing_scores, sparse_mixer
from ascend_run.ops.experts.routing_noise import evenly_selected

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def test_the_one_sigmoid_weight_of_topk_1_is_not_normalised() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    weights, chosen = routing_scores(logits, 1, "sigmoid", False)
    assert chosen.tolist() == [[False, False, True]]
    torch.testing.assert_close(weights[:, 2:], logits[:, 2:].sigmoid(), **EXACT)
    assert not weights[:, :2].any()


def rows_of(scores: list[list[float]]) -> torch.Tensor:
    return torch.tensor(scores, dtype=torch.float64)


def indices(chosen: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in chosen]


def test_of_equal_scores_the_lowest_indices_are_selected() -> None:
    inf, nan = torch.inf, torch.nan
    scores = rows_of(
        [
            [1, 1, 1, 1, 1],
            [0, 1, 2, 1, 1],
            [3, 0, 3, 1, 0],
            [-0.0, 0.0, -1, 0.0, -0.0],
            [-inf, -inf, 5, -inf, -inf],
            [nan, nan, nan, nan, nan],
            [nan, 1, 0, nan, 1],
        ]
    )
    wanted = [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2], [1, 2, 4]]
    assert indices(largest(scores, 3)) == wanted


def test_ties_of_many_experts_are_broken_as_by_a_stable_sort() -> None:
    """Of more entries than a kernel sorts at once, drawn from few values."""
    draw = torch.Generator().manual_seed(11)
    scores = torch.randint(0, 4, (200, 300), generator=draw).double()
    wanted = [
        sorted(sorted(range(300), key=lambda x: -row[x])[:37])  # Python's sort is stable
        for row in scores.tolist()
    ]
    assert indices(largest(scores, 37)) == wanted


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_groups_and_equal_experts_follow_the_same_rule(score: str) -> None:
    """Of four equal groups the first two are kept, and of their experts the first three."""
    logits = torch.zeros(4, 12, dtype=torch.float64)
    weights, chosen = routing_scores(logits, 3, score, True, groups=(4, 2))
    assert indices(chosen) == [[0, 1, 2]] * 4
    value = 1 / 12 if score == "softmax" else 1 / 3
    torch.testing.assert_close(weights, chosen.double() * value, **EXACT)


def test_sparse_mixer_selects_the_lowest_of_equal_experts() -> None:
    _, chosen = sparse_mixer(rows_of([[1, 2, 2, 1, 2], [0, 0, 0, 0, 0]]), 2, 0.01)
    assert indices(chosen) == [[1, 2], [0, 1]]


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
        assert indices(chosen[token, None]) == [sorted(allowed)]
        wanted = plain[allowed] if score == "softmax" else plain[allowed] / plain[allowed].sum()
        torch.testing.assert_close(weights[token, allowed], wanted, **EXACT)
        assert torch.equal(weights[token] > 0, chosen[token])
    assert not torch.equal(chosen, unbiased)
    assert not torch.equal(chosen, ungrouped)


@pytest.mark.parametrize("eps", [0.01, 0.3])
def test_sparse_mixer_weighs_each_expert_among_those_near_the_best(eps: float) -> None:
    """Token by token from the paper's description, with the gradient of the weights."""
    logits = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    logits.requires_grad_()
    weights, chosen = sparse_mixer(logits, 2, eps)
    rows, counts, places = [], set(), []
    for token, row in enumerate(logits):
        values = row.tolist()
        left = sorted(range(6), key=lambda expert: -values[expert])
        assert indices(chosen[token, None]) == [sorted(left[:2])]
        places.append(left[:2])
        for place in range(2):
            best = values[left[place]]
            near = [
                x for x in left[place:] if best - values[x] <= 2 * eps * max(abs(values[x]), best)
            ]
            counts.add(len(near))
            rows.append(row[left[place]].exp() / row[near].exp().sum())
    assert len(counts) > 1
    wanted = torch.stack(rows).view(40, 2)
    weights = weights.gather(1, torch.tensor(places))
    torch.testing.assert_close(weights, wanted, **EXACT)
    factors = torch.linspace(0.5, 2.0, 80, dtype=torch.float64).view(40, 2)
    ours, plain = (torch.autograd.grad((w * factors).sum(), logits)[0] for w in (weights, wanted))
    assert plain.any()
    torch.testing.assert_close(ours, plain, **EXACT)


def test_drawn_experts_of_sparse_mixer_follow_its_softmax() -> None:
    """One expert a token: drawn by its share; a third of it is the weight in three of four draws of
    one that is not the best; the gradient is that of the share."""
    row = rows_of([[1.0, 0.9, 0.5, -2.0, 0.95]])
    logits = row.expand(20000, 5).clone().requires_grad_()
    draw = torch.Generator().manual_seed(3)
    weights, chosen = sparse_mixer(logits, 1, 0.2, draw)
    near = row.masked_fill(rows_of([[0, 0, 1, 1, 0]]).bool(), -torch.inf)  # 0.5 is 0.5 away
    shares = near.exp() / near.exp().sum()
    torch.testing.assert_close(chosen.double().mean(dim=0), shares[0], rtol=0.0, atol=0.02)
    factor = (weights / shares)[chosen]
    index = chosen.double().argmax(dim=-1)
    torch.testing.assert_close(factor[index == 0], torch.ones_like(factor[index == 0]), **EXACT)
    others = factor[index != 0]
    third = (others - 1 / 3).abs() < 1e-12
    torch.testing.assert_close(others[~third], torch.ones_like(others[~third]), **EXACT)
    assert float(third.double().mean()) == pytest.approx(0.75, abs=0.02)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    own = torch.nn.functional.one_hot(index, 5).double()
    share = (own * shares).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(gradient, share * (own - shares), **EXACT)


def test_drawn_experts_of_sparse_mixer_are_different_and_reproducible() -> None:
    logits = torch.randn(300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    first, second, other = (
        sparse_mixer(logits, 3, 0.5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first[1].sum(dim=-1).tolist() == [3] * 300
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], other[1])
    assert torch.equal(first[0] > 0, first[1])


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(12, 8, 2), (7, 5, 3), (1, 4, 4)])
def test_even_selections_differ_by_one_token_at_most(tokens: int, experts: int, topk: int) -> None:
    chosen = evenly_selected(torch.zeros(tokens, experts), topk)
    assert chosen.sum(dim=1).tolist() == [topk] * tokens
    loads = chosen.sum(dim=0).tolist()
    assert max(loads) - min(loads) <= 1
