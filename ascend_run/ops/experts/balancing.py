"""Losses of the router: sums over the tokens of one rank, whatever the number of ranks.

Source: load balancing, arXiv:2101.03961 (equation 4); of each sequence, arXiv:2412.19437 (equation
17); z-loss, arXiv:2202.08906 (equation 5).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# S tokens of a sequence on this rank, B micro-batch, X experts


def z_loss(logits: Tensor) -> Tensor:
    """Return ``sum of logsumexp(logits) ** 2`` over tokens; ``logits``: [..., X]."""
    return logits.logsumexp(dim=-1).square().sum()


def balance_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return each token's scores of all experts, whose sum is 1: [..., X]."""
    if score_function == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return logits.softmax(dim=-1)


def balancing_loss(
    scores_SBX: Tensor,
    chosen_SBX: Tensor,
    group: dist.ProcessGroup,
    *,
    by_sequence: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of ``num_tokens * X * sum_i f_i P_i``, and all ranks' selections.

    f_i is the fraction of selections that are of expert i, over all full sequences; P_i the mean
    of its scores. The parts of all ranks that share the sequences add up to the loss.

    Args:
        scores_SBX: Of ``balance_scores``.
        chosen_SBX: Whether a token selects an expert.
        group: The ranks that share the sequences.
        by_sequence: Compute the loss of each sequence alone and add them up.
    """
    over = (0,) if by_sequence else (0, 1)
    tokens_BX = chosen_SBX.sum(dim=over, keepdim=True).to(scores_SBX.dtype)
    dist.all_reduce(tokens_BX, group=group)
    fraction_BX = tokens_BX / tokens_BX.sum(dim=-1, keepdim=True)
    loss = scores_SBX.shape[-1] * (fraction_BX * scores_SBX.sum(dim=over, keepdim=True)).sum()
    return loss, tokens_BX.sum()
