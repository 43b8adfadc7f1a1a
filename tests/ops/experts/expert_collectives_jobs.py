"""Expert collectives on a rank, with shards of full tensors."""

# E experts, C tokens of an expert from one expert parallel rank, H hidden, M width

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ascend_run.ops.experts.expert_collectives import (
    all_to_all_all_gather_bmm,
    bmm_reduce_scatter_all_to_all,
)

E, C, H, M = 4, 6, 8, 10


def _whole(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _groups(ep: int, tp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's expert parallel and tensor parallel group; the latter has adjacent
    ranks."""
    rank = dist.get_rank()
    mine = []
    for ranks in (
        [[e * tp + t for e in range(ep)] for t in range(tp)],
        [[e * tp + t for t in range(tp)] for e in range(ep)],
    ):
        made = [dist.new_group(members) for members in ranks]
        mine.append(next(g for g, members in zip(made, ranks, strict=True) if rank in members))
    return mine[0], mine[1]


def feed_forward(ep: int, tp: int, shard_type: int) -> dict[str, float]:
    """Return the max errors of both outputs and every gradient against the unsharded
    computation."""
    rank = dist.get_rank()
    e, t = divmod(rank, tp)
    ep_group, tp_group = _groups(ep, tp)
    experts = slice(e * E // ep, (e + 1) * E // ep)
    axis = 1 if shard_type else 2
    whole = {
        "x": _whole(ep, E, C, H, seed=0),
        "w1": _whole(E, H, M, seed=1),
        "b1": _whole(E, M, seed=2),
        "w2": _whole(E, M, H, seed=3),
        "b2": _whole(E, H, seed=4),
    }
    upstream = _whole(ep, E, C, H, seed=5)
    leaves = {name: value.clone().requires_grad_() for name, value in whole.items()}
    product = torch.einsum("pech,ehm->pecm", leaves["x"], leaves["w1"]) + leaves["b1"][:, None]
    out = torch.einsum("pecm,emh->pech", F.silu(product), leaves["w2"]) + leaves["b2"][:, None]
    wanted = dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream), strict=True)
    )

    def cut(values: dict[str, Tensor], *, own_tokens: bool = False) -> dict[str, Tensor]:
        """Return this rank's shard of each tensor."""
        b2 = values["b2"][experts]
        return {
            "x": values["x"][e].chunk(tp, axis)[t],
            "w1": values["w1"][experts].chunk(tp, 2)[t],
            "b1": values["b1"][experts].chunk(tp, 1)[t],
            "w2": values["w2"][experts].chunk(tp, 1)[t],
            "b2": b2 if shard_type else b2.chunk(tp, 1)[t],
        }

    mine = {name: value.clone().requires_grad_() for name, value in cut(whole).items()}
    first = all_to_all_all_gather_bmm(
        mine["x"],
        mine["w1"],
        ep_group,
        tp_group,
        bias=mine["b1"].unsqueeze(1),
        shard_type=shard_type,
        activation="silu",
        gathered=True,
        product=True,
    )
    second = bmm_reduce_scatter_all_to_all(
        first.out, mine["w2"], ep_group, tp_group, bias=mine["b2"], shard_type=shard_type
    )
    my_upstream = upstream[e].chunk(tp, axis)[t]
    gradients = dict(
        zip(mine, torch.autograd.grad(second, list(mine.values()), my_upstream), strict=True)
    )
    if shard_type:  # replicated: each rank's gradient covers its own tokens
        dist.all_reduce(gradients["b2"], group=tp_group)
    tokens = whole["x"][:, experts].transpose(0, 1).flatten(1, 2)
    before = product[:, experts].transpose(0, 1).flatten(1, 2).chunk(tp, 2)[t]
    pairs = {
        "gathered": (first.gathered, tokens),
        "product": (first.product, before),
        "first": (first.out, F.silu(before)),
        "second": (second, out[e].chunk(tp, axis)[t]),
        **{f"d{name}": (gradients[name], want) for name, want in cut(wanted).items()},
    }
    return {name: _difference(*pair) for name, pair in pairs.items()}


def _difference(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None
    assert ours.shape == theirs.shape
    return float((ours - theirs).detach().abs().max())


def nothing_more_is_answered() -> bool:
    group = dist.group.WORLD
    alone = _groups(dist.get_world_size(), 1)[1]
    x, weight = _whole(4, 2, 3, seed=0), _whole(2, 3, 5, seed=1)
    result = all_to_all_all_gather_bmm(x, weight, group, alone, product=True)
    return result.gathered is None and result.product is None
