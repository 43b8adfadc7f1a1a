"""Exchanges on a rank, each with what it should give, cut from the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.attention.exchanged_attention import exchanged_attention, lengths_of_ranks
from ascend_run.ops.attention.head_shares import Cut
from ascend_run.ops.transfer import all_to_all
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


def shared_out(
    heads: tuple[int, ...], cuts: tuple[Cut, ...], lengths: tuple[int, ...] | None
) -> tuple[int, list[bool]]:
    """(messages, whether each was right), of tensors of these heads, a bfloat16 one last.

    Numbers are whole, so that sums are exact.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held = lengths or (2,) * size
    dtypes = [*[torch.float32] * (len(heads) - 1), torch.bfloat16]
    wholes = [
        (8 * _whole(sum(held), 2, n, 3 - i % 2, seed=i)).round().to(dtype)
        for i, (n, dtype) in enumerate(zip(heads, dtypes, strict=True))
    ]
    by_sequence = [whole.split(held)[rank] for whole in wholes]
    by_heads = [whole[..., slice(*cut[rank]), :] for whole, cut in zip(wholes, cuts, strict=True)]
    owners = [
        torch.tensor([sum(a <= head < b for a, b in cut) for head in range(n)])[:, None]
        for n, cut in zip(heads, cuts, strict=True)
    ]
    asked = {"cuts": cuts, "lengths": lengths}
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


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, B, N, D] three times -> [S, B, N, E]; every query sees every key."""
    weights = torch.einsum("sbnd,tbnd->bnst", q, k).softmax(-1)
    return torch.einsum("bnst,tbne->sbne", weights, v)


def encoder(
    heads: int, groups: int, lengths: tuple[int, ...]
) -> tuple[int, list[int], list[float]]:
    """(messages, the lengths asked for, differences of output and gradients)."""
    rank = dist.get_rank()
    wholes = [_whole(sum(lengths), 2, n, d, seed=n + d) for n, d in
              ((heads, 4), (groups, 4), (groups, 3))]  # fmt: skip
    dout = _whole(sum(lengths), 2, heads, 3, seed=9)
    leaves = [x.requires_grad_() for x in wholes]
    out = plain(leaves[0], *(x.repeat_interleave(heads // groups, -2) for x in leaves[1:]))
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    parts = [x.detach().split(lengths)[rank].requires_grad_() for x in wholes]
    asked = lengths_of_ranks(lengths[rank], dist.group.WORLD, torch.device("cpu"))
    with count_collectives() as seen:
        mine = exchanged_attention(plain, *parts, dist.group.WORLD, lengths=asked)
        found = [mine, *torch.autograd.grad(mine, parts, dout.split(lengths)[rank])]
    away = [
        ((x - y.split(lengths)[rank]).abs().max() / y.abs().max()).item()
        for x, y in zip(found, expected, strict=True)
    ]
    return seen.calls["alltoall_base_"], asked, away
