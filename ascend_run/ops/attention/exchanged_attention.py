"""Any differentiable attention on sequences that ranks hold in parts, of any lengths.

For who has no kernel of the attention contract: an encoder's own attention, say, whose patches are
as many as the image gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.transfer.all_to_all import heads_to_sequence, sequence_to_heads

from .head_shares import Cut, head_shares

# S whole sequence, s of this rank; B batch; N query heads and G key-value heads, n of this rank; D
# width of q and k, E width of v


def exchanged_attention(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Attention output [s, B, N, E], differentiable in q, k and v.

    Args:
        attention: [S, B, n, D], [S, B, n, D], [S, B, n, E] -> [S, B, n, E], with as many key-value
            heads as query heads; differentiable.
        q: [s, B, N, D]; so k and v with G heads, G a divisor of N, and N at least the ranks.
        lengths: s of each rank (``lengths_of_ranks`` asks for them); default: the same.

    Messages: two, and two in backward. Numerics: bitwise what ``attention`` gives for each head.
    """
    shares = head_shares(q.shape[-2], k.shape[-2], group.size())
    queries = tuple(share.queries for share in shares)
    groups = tuple(share.groups for share in shares)
    whole_q, *keys = _ToSequence.apply(group, (queries, groups, groups), lengths, q, k, v)
    share, each = shares[group.rank()], q.shape[-2] // k.shape[-2]
    of_heads = torch.arange(*share.queries, device=q.device) // each - share.groups[0]
    whole_k, whole_v = (x.index_select(-2, of_heads) for x in keys)
    (out,) = _ToHeads.apply(group, (queries,), lengths, attention(whole_q, whole_k, whole_v))
    return out


def lengths_of_ranks(held: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """What each rank holds; one message of a number, which the host waits for.

    Args:
        device: One that the group's messages come from.
    """
    mine = torch.tensor([held], device=device)
    found = mine.new_empty(group.size())
    dist.all_gather_into_tensor(found, mine, group=group)
    return found.tolist()


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        cuts: Sequence[Cut],
        lengths: Sequence[int] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.asked = (group, cuts, lengths)
        return tuple(heads_to_sequence(tensors, group, cuts=cuts, lengths=lengths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, cuts, lengths = ctx.asked
        return None, None, None, *sequence_to_heads(gradients, group, cuts=cuts, lengths=lengths)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        cuts: Sequence[Cut],
        lengths: Sequence[int] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.asked = (group, cuts, lengths)
        return tuple(sequence_to_heads(tensors, group, cuts=cuts, lengths=lengths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, cuts, lengths = ctx.asked
        return None, None, None, *heads_to_sequence(gradients, group, cuts=cuts, lengths=lengths)
