"""Which experts are replicated: those of the ranks with most rows, by the counts of all ranks."""

# E expert-parallel ranks, X experts

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class HotChoice:
    """The experts that every rank has a replica of, equal on all ranks."""

    experts: tuple[int, ...]
    """In ascending order."""
    rows_before: tuple[int, ...]
    """Rows that each rank would compute without replicas."""
    rows_after: tuple[int, ...]
    """Rows that each rank computes: those of its own experts, without what other ranks keep, and
    those that it keeps of replicas."""


def hot_experts(counts_EX: Tensor, most: int) -> HotChoice:
    """Choose greedily: repeatedly the expert with most rows of the rank that computes most.

    Each choice moves the rows of the expert to the ranks of their tokens. Of equal ranks and
    experts the first is taken. Of the choices, as many are kept as give the fullest rank the fewest
    rows; no replica is made that does not lower them.

    Args:
        counts_EX: Rows that each rank has for each expert, on the host.
        most: Experts to choose; at most those of a rank.
    """
    num_ranks, num_experts = counts_EX.shape
    local = num_experts // num_ranks
    rows_X = counts_EX.sum(dim=0).tolist()
    before = [sum(rows_X[rank * local : (rank + 1) * local]) for rank in range(num_ranks)]
    rows, chosen = list(before), list[int]()
    kept, after = 0, before
    for _ in range(most):
        owner = rows.index(max(rows))
        left = [at for at in range(owner * local, (owner + 1) * local) if at not in chosen]
        chosen.append(max(left, key=rows_X.__getitem__))
        for rank, stay in enumerate(counts_EX[:, chosen[-1]].tolist()):
            rows[owner] -= stay
            rows[rank] += stay
        if max(rows) < max(after):
            kept, after = len(chosen), list(rows)
    return HotChoice(tuple(sorted(chosen[:kept])), tuple(before), tuple(after))


def kept_rows(counts_EX: Tensor, experts: Sequence[int]) -> Tensor:
    """Return how many rows for each expert a rank keeps [E, X]: all of those for replicated experts
    that another rank owns."""
    local = counts_EX.shape[1] // len(counts_EX)
    kept_EX = torch.zeros_like(counts_EX)
    for expert in experts:
        kept_EX[:, expert] = counts_EX[:, expert]
        kept_EX[expert // local, expert] = 0
    return kept_EX
