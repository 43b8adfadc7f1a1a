"""All-to-alls that reshard between sequence and heads.

Ranks may hold parts of different lengths and take different numbers of heads, and several may take
the same head; each call runs one all-to-all.

Source: the layout change of DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_shares import HeadRanges, parts

from .columns import Columns

# P ranks of the group; S sequence of all of them, s of this one; N heads, n of this rank; ... batch
# dims, none in packed layout; D head width


def heads_to_sequence(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    head_ranges: Sequence[HeadRanges] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """Reshard from sequence to heads: trade heads for the full sequence, in one all-to-all.

    Args:
        tensors: Each [s, ..., N_i, D_i] with the same s and batch dims. Any strides.
        head_ranges: For each tensor the heads that each rank receives; default: equal ``parts``.
        lengths: s of each rank; default: all equal.

    Returns:
        Each [S, ..., n_i, D_i]: views of one receive buffer. Not contiguous; the last stride is 1.

    Numerics: bitwise.
    """
    size, rank, first = group.size(), group.rank(), tensors[0]
    head_ranges = head_ranges or [parts(x.shape[-2], size) for x in tensors]
    columns = _columns(tensors, head_ranges)
    mine, rows = columns[rank], first.shape[0]
    lengths = lengths or [rows] * size
    send = first.new_empty(rows * sum(c.width for c in columns), dtype=mine.buffer_dtype)
    if all(c is mine for c in columns):
        places = mine.unpack(send.view(size, rows, mine.width))
        for place, x, ranges in zip(places, tensors, head_ranges, strict=True):
            _copy_by_rank(place, x, ranges)
    else:
        blocks = send.split([rows * c.width for c in columns])
        for to, (block, column) in enumerate(zip(blocks, columns, strict=True)):
            places = column.unpack(block.view(rows, column.width))
            for place, x, ranges in zip(places, tensors, head_ranges, strict=True):
                place.copy_(x[..., slice(*ranges[to]), :])
    received = first.new_empty((sum(lengths), mine.width), dtype=mine.buffer_dtype)
    arriving = [n * mine.width for n in lengths]
    _exchange(received, send, arriving, [rows * c.width for c in columns], group)
    return mine.unpack(received)


def sequence_to_heads(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    head_ranges: Sequence[HeadRanges] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """Reshard from heads to sequence: the inverse of ``heads_to_sequence``, in one all-to-all.

    Args:
        tensors: Each [S, ..., n_i, D_i] with the same S and batch dims; dtypes may differ (an
            output and its log-sum-exp). Any strides.
        head_ranges: For each tensor the heads that each rank has; default: n_i each.
        lengths: Length that each rank receives of S; default: all equal.

    Returns:
        Each [s, ..., N_i, D_i], contiguous; heads that several ranks have are summed.

    Numerics: bitwise, except for these sums, which are one reduction.
    """
    size, rank, first = group.size(), group.rank(), tensors[0]
    head_ranges = head_ranges or [parts(x.shape[-2] * size, size) for x in tensors]
    columns = _columns(tensors, head_ranges)
    lengths = lengths or [first.shape[0] // size] * size
    mine, rows = columns[rank], lengths[rank]
    send = mine.pack(tensors)
    sizes = [rows * c.width for c in columns]
    received = send.new_empty(sum(sizes))
    _exchange(received, send, sizes, [n * mine.width for n in lengths], group)
    if all(c is mine for c in columns):
        by_source = mine.unpack(received.view(size, rows, mine.width))
        return [
            _collected(part, ranges) for part, ranges in zip(by_source, head_ranges, strict=True)
        ]
    blocks = zip(received.split(sizes), columns, strict=True)
    by_tensor = zip(*(c.unpack(block.view(rows, c.width)) for block, c in blocks), strict=True)
    return [_joined(shards, ranges) for shards, ranges in zip(by_tensor, head_ranges, strict=True)]


def _columns(tensors: Sequence[Tensor], head_ranges: Sequence[HeadRanges]) -> list[Columns]:
    """Return each rank's layout; the same object if all ranks have equally many heads."""
    of_ranks = [tuple(stop - start for start, stop in of) for of in zip(*head_ranges, strict=True)]
    made = {of: Columns(tensors, of) for of in of_ranks}
    return [made[of] for of in of_ranks]


def _exchange(
    received: Tensor,
    send: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Run the all-to-all; equal sizes are omitted, which is faster."""
    even = len({*received_sizes}) == len({*sent_sizes}) == 1
    outputs, inputs = (None, None) if even else ([*received_sizes], [*sent_sizes])
    dist.all_to_all_single(received.view(-1), send.view(-1), outputs, inputs, group=group)


def _copy_by_rank(place: Tensor, x: Tensor, ranges: HeadRanges) -> None:
    """Copy [s, ..., N, D] to [P, s, ..., n, D]: in one copy if the ranks' heads are regular."""
    size, heads = len(ranges), x.shape[-2]
    if ranges == parts(heads, size):
        place.copy_(x.unflatten(-2, (size, -1)).movedim(-3, 0))
    elif ranges == _one_each(heads, size):
        place.unflatten(0, (heads, -1)).copy_(x.movedim(-2, 0).unsqueeze(1).unsqueeze(-2))
    else:
        for block, heads_of_rank in zip(place, ranges, strict=True):
            block.copy_(x[..., slice(*heads_of_rank), :])


def _collected(by_source: Tensor, ranges: HeadRanges) -> Tensor:
    """Copy [P, s, ..., n, D] to [s, ..., N, D], the inverse."""
    size, heads = len(ranges), ranges[-1][1]
    if ranges == parts(heads, size):
        return by_source.movedim(0, -3).flatten(-3, -2).contiguous()
    if ranges == _one_each(heads, size):
        summed = by_source.squeeze(-2).unflatten(0, (heads, -1)).sum(1)
        out: Tensor = summed.movedim(0, -2).contiguous()
        return out
    return _joined(by_source.unbind(0), ranges)


def _one_each(heads: int, size: int) -> HeadRanges | None:
    """Return the partition with one head a rank and equally many ranks per head, or None."""
    if size % heads:
        return None
    return tuple((rank * heads // size, rank * heads // size + 1) for rank in range(size))


def _joined(shards: Sequence[Tensor], ranges: HeadRanges) -> Tensor:
    """Concatenate [s, ..., n_j, D] of each rank j to [s, ..., N, D]."""
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges)):
        return torch.cat([*shards], dim=-2)
    heads = []
    for head in range(ranges[-1][1]):
        copies = [
            shard[..., head - start, :]
            for shard, (start, stop) in zip(shards, ranges, strict=True)
            if start <= head < stop
        ]
        heads.append(copies[0] if len(copies) == 1 else torch.stack(copies).sum(0))
    return torch.stack(heads, dim=-2)
