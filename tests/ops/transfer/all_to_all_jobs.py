"""All-to-alls on a rank, each with its expected result from the full tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.head_shares import HeadRanges
from ascend_run.ops.transfer import all_to_all
from ascend_run.testing.effects import count_collectives


def _whole(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def together(dtypes: tuple[torch.dtype, ...], packed: bool) -> tuple[int, list[bool]]:
    """Return (collectives, whether each tensor was right) for heads to sequence and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = () if packed else (3,)
    shapes = [(8, *batch, 4 * (i + 1), (5, 2, 1)[i]) for i in range(len(dtypes))]
    wholes = [
        _whole(*shape, dtype=dtype, seed=i)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    by_sequence = [whole.chunk(size, 0)[rank] for whole in wholes]
    by_heads = [whole.chunk(size, -2)[rank] for whole in wholes]
    with count_collectives() as seen:
        forth = all_to_all.heads_to_sequence(by_sequence, dist.group.WORLD)
        back = all_to_all.sequence_to_heads(by_heads, dist.group.WORLD)
    right = [
        torch.equal(x, y) and x.dtype == y.dtype
        for x, y in zip([*forth, *back], [*by_heads, *by_sequence], strict=True)
    ]
    return seen.calls["alltoall_base_"], right


def shared_out(
    heads: tuple[int, ...], head_ranges: tuple[HeadRanges, ...], lengths: tuple[int, ...] | None
) -> tuple[int, list[bool]]:
    """Return (collectives, whether each was right) for tensors of these heads, a bfloat16 one last.

    The values are integers, so that sums are exact.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held = lengths or (2,) * size
    dtypes = [*[torch.float32] * (len(heads) - 1), torch.bfloat16]
    wholes = [
        (8 * _whole(sum(held), 2, n, 3 - i % 2, seed=i)).round().to(dtype)
        for i, (n, dtype) in enumerate(zip(heads, dtypes, strict=True))
    ]
    by_sequence = [whole.split(held)[rank] for whole in wholes]
    by_heads = [
        whole[..., slice(*ranges[rank]), :]
        for whole, ranges in zip(wholes, head_ranges, strict=True)
    ]
    owners = [
        torch.tensor([sum(a <= head < b for a, b in ranges) for head in range(n)])[:, None]
        for n, ranges in zip(heads, head_ranges, strict=True)
    ]
    asked = {"head_ranges": head_ranges, "lengths": lengths}
    with count_collectives() as seen:
        forth = all_to_all.heads_to_sequence(by_sequence, dist.group.WORLD, **asked)
        back = all_to_all.sequence_to_heads(by_heads, dist.group.WORLD, **asked)
    expected = [
        *by_heads,
        *((x * n).to(x.dtype) for x, n in zip(by_sequence, owners, strict=True)),
    ]
    right = [
        torch.equal(x, y) and x.dtype == y.dtype and x.stride(-1) == 1
        for x, y in zip([*forth, *back], expected, strict=True)
    ]
    return seen.calls["alltoall_base_"], right
