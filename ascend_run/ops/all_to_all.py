"""All-to-all exchanges that turn a split of the sequence into a split of the heads, and back.

Source: the layout change of DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from .columns import Columns

# P ranks of the group; S sequence of all of them, s = S / P of one; N heads, n = N / P of one rank;
# ... batch dimensions, none in packed layout; D head width


def heads_to_sequence(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, repeats: Sequence[int] | None = None
) -> list[Tensor]:
    """Give up heads for the whole sequence, several tensors in one message.

    Args:
        tensors: Each [s, ..., N_i, D_i]; one s and one batch, heads and widths as they are. Any
            strides.
        repeats: How often each head of a tensor is repeated, beside itself, before the cut;
            P divides ``N_i * repeats[i]``. Default: once.

    Returns:
        Each [S, ..., n_i, D_i]: views of one buffer, so that nothing is copied after arrival.
        The strides are not contiguous; the last one is 1.

    Numerics: bitwise.
    """
    size = group.size()
    cut = []
    for x, repeat in zip(tensors, repeats or [1] * len(tensors), strict=True):
        repeated = x if repeat == 1 else x.repeat_interleave(repeat, dim=-2)
        cut.append(repeated.unflatten(-2, (size, -1)).movedim(-3, 0))  # [P, s, ..., n, D]
    columns = Columns(cut)
    send = columns.pack(cut)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return columns.unpack(received.flatten(0, 1))


def sequence_to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Give up the rest of the sequence for all heads: ``heads_to_sequence`` backwards.

    Args:
        tensors: Each [S, ..., n_i, D_i]; one S and one batch; dtypes may differ (an output
            travels with its log-sum-exp), and still it is one message. Any strides.

    Returns:
        Each [s, ..., N_i, D_i], contiguous.

    Numerics: bitwise.
    """
    columns = Columns(tensors)
    send = columns.pack(tensors)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    by_source = received.unflatten(0, (group.size(), -1))
    return [part.movedim(0, -3).flatten(-3, -2).contiguous() for part in columns.unpack(by_source)]
