"""Row-parallel matmuls on a rank, with shards of full operands."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear.reduced_matmul import (
    Dequantisation,
    grouped_matmul_all_reduce,
    mm_all_reduce_add_rms_norm,
    mm_all_reduce_add_rms_norm_,
)

EPS = 1e-6


def _whole(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _case(kind: str) -> tuple[Tensor, Tensor, Tensor, Dequantisation, Tensor]:
    """Return this rank's (x, matrix, bias), their dequantisation, and the expected values: the full
    output [3, 2, 6] and all biases."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bias = _whole(6, seed=9) if kind != "int8" else _integers(6, seed=9).int()
    x = _integers(3, 2, 8, seed=0) if kind == "int8" else _whole(3, 2, 8, seed=0)
    w = _whole(8, 6, seed=1) if kind == "wide" else _integers(8, 6, seed=1)
    mine = x.chunk(size, -1)[rank].contiguous(), w.chunk(size, 0)[rank]
    exact = torch.einsum("sbk,kn->sbn", x.double(), w.double())
    if kind == "wide":
        return *mine, bias, Dequantisation(), exact + size * bias
    if kind == "int8":
        scale = _whole(6, seed=2) / 1e4
        return *mine, bias, Dequantisation(dequant_scale=scale), (exact + size * bias) * scale
    scale, offset = _whole(6, seed=2) / 1e2, _whole(6, seed=3)
    if kind == "channel":
        how = Dequantisation(antiquant_scale=scale, antiquant_offset=offset)
        stands_for = (w + offset) * scale
    else:  # three rows share a scale: two groups on each rank, the last one shorter
        scale, offset = (_whole(size, 2, 6, seed=seed) for seed in (2, 3))
        group = [[i // 3 for i in range(8 // size)] for _ in range(size)]
        rows = torch.cat([scale[r][group[r]] for r in range(size)])
        shifts = torch.cat([offset[r][group[r]] for r in range(size)])
        how = Dequantisation(
            antiquant_scale=scale[rank], antiquant_offset=offset[rank], group_size=3
        )
        stands_for = (w + shifts) * rows
    return *mine, bias, how, torch.einsum("sbk,kn->sbn", x, stands_for) + size * bias


def add_rms_norm(kind: str, in_place: bool) -> list[float]:
    x, matrix, bias, how, product = _case(kind)
    residual, gamma = _whole(3, 2, 6, seed=4), _whole(6, seed=5)
    given = residual.clone()
    operator = mm_all_reduce_add_rms_norm_ if in_place else mm_all_reduce_add_rms_norm
    flat = x.flatten(0, 1) if kind == "wide" else x  # also accepts two dims
    y, normalised = operator(
        flat, matrix, given, gamma, dist.group.WORLD, eps=EPS, bias_N=bias, quantised=how
    )
    assert (y is given) == in_place
    assert in_place or torch.equal(given, residual)
    want = product + residual
    rms = torch.stack([row.pow(2).sum() for row in want.view(-1, 6)]).view(3, 2, 1) / 6
    want_normalised = want / (rms + EPS).sqrt() * gamma
    return [
        float(((a - b) / b.abs().max()).abs().max())
        for a, b in ((y, want), (normalised, want_normalised))
    ]


def grouped(split_item: int, with_bias: bool) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    single = split_item in (1, 3)
    widths = (5, 5) if split_item > 1 else (5, 7)
    inner = (8, 8) if single else (8, 4)
    xs = [_whole(rows, k, seed=i) for i, (rows, k) in enumerate(zip((3, 2), inner, strict=True))]
    pairs = enumerate(zip(inner, widths, strict=True), 2)
    ws = [_whole(k, n, seed=i) for i, (k, n) in pairs]
    bs = [_whole(n, seed=10 + i) for i, n in enumerate(widths)]
    mine = [x.chunk(size, 1)[rank] for x in xs]
    got = grouped_matmul_all_reduce(
        [torch.cat(mine)] if single else mine,
        [w.chunk(size, 0)[rank] for w in ws],
        dist.group.WORLD,
        biases=bs if with_bias else None,
        group_list=[3, 5] if single else None,
        split_item=split_item,
    )
    want = [x @ w + (b if with_bias else 0) for x, w, b in zip(xs, ws, bs, strict=True)]
    if split_item > 1:
        want = [torch.cat(want)]
    assert len(got) == len(want)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
