"""Selection of each token's experts from the router's logits.

One rule breaks ties everywhere: of experts with equal scores, those of lower index are selected.
``torch.topk`` selects any of them, and another one on another platform.

Source: weights, arXiv:2101.03961 (softmax over all experts), arXiv:2401.04088 (over the selected
ones), arXiv:2412.19437 (sigmoid, bias); groups, arXiv:2405.04434 (section 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

# T tokens, X experts, K selected experts of a token, G groups of experts


def largest(scores: Tensor, count: int) -> Tensor:
    """Return whether each entry is among the ``count`` largest of its row; NaN is the smallest.

    Of equal entries, those of lower index are.
    """
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    smallest = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > smallest, scores == smallest
    missing = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= missing))


def routing_scores(
    logits_TX: Tensor,
    topk: int,
    score_function: str,
    pre_softmax: bool,
    *,
    groups: tuple[int, int] | None = None,
    bias_X: Tensor | None = None,
    chosen_TX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's weights [T, X], and whether it selects an expert [T, X].

    ``softmax`` is computed over the selected experts (Mixtral), or with ``pre_softmax`` over all
    experts (Switch). ``sigmoid`` weights are normalized over the selected experts (DeepSeek-V3).
    The weights of other experts are 0.

    Args:
        groups: Number of groups of experts, and how many of them a token may select from. A group
            is scored by its best expert (DeepSeek-V2), with ``sigmoid`` by the sum of its two best.
        bias_X: Added to the scores for the selection, not to the weights (DeepSeek-V3).
        chosen_TX: The selection, if it is not by score.
    """
    is_sigmoid = score_function == "sigmoid"
    scores_TX = logits_TX
    if is_sigmoid:
        scores_TX = logits_TX.sigmoid()
    elif pre_softmax:
        scores_TX = logits_TX.softmax(dim=-1)
    if chosen_TX is None:
        ranked_TX = scores_TX.detach() if bias_X is None else scores_TX.detach() + bias_X
        if groups is not None:
            ranked_TX = _within_groups(ranked_TX, *groups, best=2 if is_sigmoid else 1)
        chosen_TX = largest(ranked_TX, topk)
    index_TK = _indices(chosen_TX, topk)
    weights_TK = scores_TX.gather(-1, index_TK)
    if is_sigmoid and topk > 1:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    elif not is_sigmoid and not pre_softmax:
        weights_TK = weights_TK.softmax(dim=-1)
    return torch.zeros_like(logits_TX).scatter(-1, index_TK, weights_TK), chosen_TX


def _indices(chosen_TX: Tensor, topk: int) -> Tensor:
    """Return the ``topk`` selected experts of each token, in ascending order: [T, K]."""
    num_experts = chosen_TX.shape[-1]
    descending_X = torch.arange(num_experts, 0, -1, device=chosen_TX.device, dtype=torch.float32)
    return (chosen_TX * descending_X).topk(topk, dim=-1).indices


def _within_groups(scores_TX: Tensor, num_groups: int, topk: int, best: int) -> Tensor:
    """Return the scores with -inf outside of each token's ``topk`` groups.

    Args:
        best: Number of a group's highest scores that are summed to rank it.
    """
    scores_TGx = scores_TX.unflatten(-1, (num_groups, -1))
    ranks_TG = scores_TGx.topk(min(best, scores_TGx.shape[-1]), dim=-1).values.sum(dim=-1)
    outside_TG1 = ~largest(ranks_TG, topk).unsqueeze(-1)
    within: Tensor = scores_TGx.masked_fill(outside_TG1, -torch.inf)
    return within.flatten(1)


def sparse_mixer(
    logits_TX: Tensor, topk: int, eps: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights [T, X] and selection [T, X] of SparseMixer.

    The experts are selected one after the other by their logits. A weight is the expert's share of
    a softmax over those left whose distance from the best is at most ``2 eps`` of the larger of its
    logit and their own magnitude.

    Args:
        generator: Draw each expert from that softmax, as in training. The weight of an expert that
            is not the best is a third of its share in three of four draws, which makes the share's
            gradient an estimate of third order (Heun) of the selection's.

    Source: arXiv:2409.12136, section 2.2, and ``sparsemixer`` of Phi-3.5-MoE's published code.
    """
    plain_TX, left_TX = logits_TX.detach(), logits_TX
    weights_TX = torch.zeros_like(logits_TX)
    chosen_TX = torch.zeros_like(logits_TX, dtype=torch.bool)
    for _ in range(topk):
        best_T1 = left_TX.detach().amax(dim=-1, keepdim=True)
        index_T1 = best = _indices(largest(left_TX.detach(), 1), 1)
        distance_TX = (best_T1 - plain_TX) / torch.maximum(plain_TX.abs(), best_T1)
        near_TX = left_TX.masked_fill(distance_TX > 2 * eps, -torch.inf)
        if generator is not None:
            index_T1 = _drawn(near_TX.detach(), generator)
        share_T1 = near_TX.softmax(dim=-1).gather(-1, index_T1)
        if generator is not None:
            whole_T1 = torch.empty_like(best_T1).uniform_(generator=generator) > 0.75
            is_third_T1 = ~(whole_T1 | (index_T1 == best))
            share_T1 = share_T1 - share_T1.detach() * is_third_T1 * (2 / 3)
        weights_TX = weights_TX.scatter(-1, index_T1, share_T1)
        left_TX = left_TX.scatter(-1, index_T1, -torch.inf)
        chosen_TX = chosen_TX.scatter(-1, index_T1, True)
    return weights_TX, chosen_TX


def _drawn(logits_TX: Tensor, generator: torch.Generator) -> Tensor:
    """Return an expert of each token, drawn from the logits' softmax: [T, 1]."""
    draws_TX = torch.empty_like(logits_TX).exponential_(generator=generator)
    return _indices(largest(logits_TX - draws_TX.log(), 1), 1)
