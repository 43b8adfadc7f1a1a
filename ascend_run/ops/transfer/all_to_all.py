"""All-to-all exchanges that turn a split of the sequence into a split of the heads, and back.

Ranks may hold parts of different lengths and take different numbers of heads, and several may take
the same head; it is one message all the same.

Source: the layout change of DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_shares import Cut, parts

from .columns import Columns

# P ranks of the group; S sequence of all of them, s of this one; N heads, n of this rank; ... batch
# dimensions, none in packed layout; D head width


def heads_to_sequence(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    cuts: Sequence[Cut] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """Give up heads for the whole sequence, several tensors in one message.

    Args:
        tensors: Each [s, ..., N_i, D_i]; one s and one batch, heads and widths as they are. Any
            strides.
        cuts: For each tensor the heads that each rank gets; default: ``parts`` of them.
        lengths: s of each rank; default: the same.

    Returns:
        Each [S, ..., n_i, D_i]: views of one buffer, so that nothing is copied after arrival.
        The strides are not contiguous; the last one is 1.

    Numerics: bitwise.
    """
    size, rank, first = group.size(), group.rank(), tensors[0]
    cuts = cuts or [parts(x.shape[-2], size) for x in tensors]
    columns = _columns(tensors, cuts)
    mine, rows = columns[rank], first.shape[0]
    lengths = lengths or [rows] * size
    send = first.new_empty(rows * sum(c.width for c in columns), dtype=mine.buffer_dtype)
    if all(c is mine for c in columns):
        places = mine.unpack(send.view(size, rows, mine.width))
        for place, x, cut in zip(places, tensors, cuts, strict=True):
            _deal_out(place, x, cut)
    else:
        blocks = send.split([rows * c.width for c in columns])
        for to, (block, column) in enumerate(zip(blocks, columns, strict=True)):
            places = column.unpack(block.view(rows, column.width))
            for place, x, cut in zip(places, tensors, cuts, strict=True):
                place.copy_(x[..., slice(*cut[to]), :])
    received = first.new_empty((sum(lengths), mine.width), dtype=mine.buffer_dtype)
    arriving = [n * mine.width for n in lengths]
    _exchange(received, send, arriving, [rows * c.width for c in columns], group)
    return mine.unpack(received)


def sequence_to_heads(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    cuts: Sequence[Cut] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """Give up the rest of the sequence for all heads: ``heads_to_sequence`` backwards.

    Args:
        tensors: Each [S, ..., n_i, D_i]; one S and one batch; dtypes may differ (an output
            travels with its log-sum-exp), and still it is one message. Any strides.
        cuts: For each tensor the heads that each rank has; default: n_i each.
        lengths: What each rank gets of S; default: the same.

    Returns:
        Each [s, ..., N_i, D_i], contiguous; of a head that several ranks have, the sum.

    Numerics: bitwise but for these sums, which are taken at once.
    """
    size, rank, first = group.size(), group.rank(), tensors[0]
    cuts = cuts or [parts(x.shape[-2] * size, size) for x in tensors]
    columns = _columns(tensors, cuts)
    lengths = lengths or [first.shape[0] // size] * size
    mine, rows = columns[rank], lengths[rank]
    send = mine.pack(tensors)
    sizes = [rows * c.width for c in columns]
    received = send.new_empty(sum(sizes))
    _exchange(received, send, sizes, [n * mine.width for n in lengths], group)
    if all(c is mine for c in columns):
        by_source = mine.unpack(received.view(size, rows, mine.width))
        return [_collected(part, cut) for part, cut in zip(by_source, cuts, strict=True)]
    blocks = zip(received.split(sizes), columns, strict=True)
    by_tensor = zip(*(c.unpack(block.view(rows, c.width)) for block, c in blocks), strict=True)
    return [_joined(pieces, cut) for pieces, cut in zip(by_tensor, cuts, strict=True)]


def _columns(tensors: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Columns]:
    """Of each rank; one and the same where all have as many heads."""
    of_ranks = [tuple(stop - start for start, stop in of) for of in zip(*cuts, strict=True)]
    made = {of: Columns(tensors, of) for of in of_ranks}
    return [made[of] for of in of_ranks]


def _exchange(
    received: Tensor,
    send: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Equal sizes go without them, which is the faster call."""
    even = len({*received_sizes}) == len({*sent_sizes}) == 1
    sizes = (None, None) if even else ([*received_sizes], [*sent_sizes])
    dist.all_to_all_single(received.view(-1), send.view(-1), *sizes, group=group)


def _deal_out(place: Tensor, x: Tensor, cut: Cut) -> None:
    """[s, ..., N, D] to [P, s, ..., n, D]: one copy where the ranks' heads are regular."""
    size, heads = len(cut), x.shape[-2]
    if cut == parts(heads, size):
        place.copy_(x.unflatten(-2, (size, -1)).movedim(-3, 0))
    elif cut == _one_each(heads, size):
        place.unflatten(0, (heads, -1)).copy_(x.movedim(-2, 0).unsqueeze(1).unsqueeze(-2))
    else:
        for block, heads_of_rank in zip(place, cut, strict=True):
            block.copy_(x[..., slice(*heads_of_rank), :])


def _collected(by_source: Tensor, cut: Cut) -> Tensor:
    """[P, s, ..., n, D] to [s, ..., N, D], the same way back."""
    size, heads = len(cut), cut[-1][1]
    if cut == parts(heads, size):
        return by_source.movedim(0, -3).flatten(-3, -2).contiguous()
    if cut == _one_each(heads, size):
        summed = by_source.squeeze(-2).unflatten(0, (heads, -1)).sum(1)
        return summed.movedim(0, -2).contiguous()
    return _joined(by_source.unbind(0), cut)


def _one_each(heads: int, size: int) -> Cut | None:
    """Where every rank takes one head, and every head goes to as many ranks."""
    if size % heads:
        return None
    return tuple((rank * heads // size, rank * heads // size + 1) for rank in range(size))


def _joined(pieces: Sequence[Tensor], cut: Cut) -> Tensor:
    """[s, ..., n_j, D] of each rank j to [s, ..., N, D]."""
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(cut)):
        return torch.cat([*pieces], dim=-2)
    heads = []
    for head in range(cut[-1][1]):
        copies = [
            piece[..., head - start, :]
            for piece, (start, stop) in zip(pieces, cut, strict=True)
            if start <= head < stop
        ]
        heads.append(copies[0] if len(copies) == 1 else torch.stack(copies).sum(0))
    return torch.stack(heads, dim=-2)
