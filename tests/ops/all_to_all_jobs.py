"""Exchanges on a rank, each with what it should give, cut from the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops import all_to_all
from ascend_run.plugin_api.testing.effects import count_collectives


def _whole(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def together(dtypes: tuple[torch.dtype, ...], packed: bool) -> tuple[int, list[bool]]:
    """(messages, whether each tensor was right) for heads to sequence and back."""
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


def repeated_heads(heads: int, repeat: int) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = _whole(8, 2, heads, 3)
    (result,) = all_to_all.heads_to_sequence(
        [whole.chunk(size, 0)[rank]], dist.group.WORLD, repeats=[repeat]
    )
    copies = [whole[..., head, :] for head in range(heads) for _ in range(repeat)]
    return torch.equal(result, torch.stack(copies, dim=-2).chunk(size, -2)[rank])
