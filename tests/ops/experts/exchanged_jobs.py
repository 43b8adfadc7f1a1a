"""Experts that exchange their tokens on a rank, in a lower precision, against a loop over rows."""

# R rows of a rank, X experts, C rows of an expert from a rank, H hidden size, F width

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ascend_run.ops.experts.exchanged_experts import ExpertGroups, exchanged_experts
from ascend_run.types.moe import ExpertActivation, ExpertWeights

X, C, H, WIDTH = 4, 3, 8, 16


def _draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _rows(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, probabilities and the output's gradient of a rank."""
    probs = _draw(X * C, seed=200 + rank).abs()
    return _draw(X * C, H, seed=100 + rank), probs, _draw(X * C, H, seed=300 + rank)


def _weights() -> dict[str, Tensor]:
    sizes = {"fc1": (X, 2 * WIDTH, H), "fc2": (X, H, WIDTH)}
    sizes |= {"fc1_bias": (X, 2 * WIDTH), "fc2_bias": (X, H)}
    return {name: _draw(*shape, seed=at) for at, (name, shape) in enumerate(sizes.items())}


def relative_errors(dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of the output and every gradient, by their largest value; all operands have
    the values that they have in the lower precision."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * X // ranks, (rank + 1) * X // ranks)
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    rounded = [tuple(x.to(dtype).double() for x in _rows(r)) for r in range(ranks)]
    weights = {n: w.to(dtype).double().requires_grad_() for n, w in _weights().items()}
    leaves = [[x.clone().requires_grad_() for x in own[:2]] for own in rounded]
    expected = [_by_row(*own, **weights) for own in leaves]
    torch.autograd.backward(expected, [own[2] for own in rounded])

    x, probs, dy = (part.detach() for part in rounded[rank])
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [x.to(dtype).requires_grad_(), probs.to(wide).requires_grad_()]
    local = {n: w.detach()[mine].to(dtype).requires_grad_() for n, w in weights.items()}
    out = exchanged_experts(
        *inputs,
        ExpertWeights(**local),
        ExpertActivation(function=F.silu),
        ExpertGroups(dist.group.WORLD, alone),
    )
    out.backward(dy.to(dtype))
    assert out.dtype is inputs[0].dtype is dtype
    pairs = {
        "out": (out, expected[rank]),
        "x": (inputs[0].grad, leaves[rank][0].grad),
        "probs": (inputs[1].grad, leaves[rank][1].grad),
    }
    for name, weight in weights.items():
        assert weight.grad is not None
        pairs[name] = local[name].grad, weight.grad[mine]
    return {name: _error(*pair) for name, pair in pairs.items()}


def _by_row(x: Tensor, probs: Tensor, **weights: Tensor) -> Tensor:
    fc1, fc2, fc1_bias, fc2_bias = weights.values()
    rows = []
    for row in range(X * C):
        e = row // C
        hidden = fc1[e] @ x[row] + fc1_bias[e]
        active = F.silu(hidden[:WIDTH]) * hidden[WIDTH:]
        rows.append(probs[row] * (fc2[e] @ active + fc2_bias[e]))
    return torch.stack(rows)


def _error(found: Tensor | None, right: Tensor | None) -> float:
    assert found is not None
    assert right is not None
    assert found.shape == right.shape
    return float((found.double() - right).abs().max() / right.abs().max())
