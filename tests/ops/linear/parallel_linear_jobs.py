"""One parallel linear on every rank, with shards of full tensors, against the unsharded formula."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear import collective_matmul as ring
from ascend_run.ops.linear import sliced_matmul as sliced
from ascend_run.ops.linear.parallel_linear import (
    LinearCollectives,
    LinearImplementation,
    parallel_linear,
)
from ascend_run.ops.linear.plain_matmuls import PLAIN, CollectiveMatmuls
from ascend_run.ops.linear.weight_gradient import matmul_add_fp32
from ascend_run.testing.effects import count_collectives

S, B, K, N = 12, 2, 8, 16
"""Full sequence, batch, inputs and outputs of the unsharded linear."""


def products(name: str) -> CollectiveMatmuls:
    if name == "plain":
        return PLAIN
    if name == "ring":
        return CollectiveMatmuls(
            all_gather_matmul=ring.all_gather_matmul,
            matmul_reduce_scatter=ring.matmul_reduce_scatter,
            matmul_all_reduce=ring.matmul_all_reduce,
        )
    number = int(name.removeprefix("sliced "))
    return CollectiveMatmuls(
        **{
            operation: functools.partial(getattr(sliced, operation), number=number)
            for operation in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        }
    )


def _whole(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _cut(exchange: LinearCollectives, x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return this rank's shards of input, weight [N, K] and output; or of their gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    column = exchange in (LinearCollectives.COLUMN, LinearCollectives.COLUMN_SEQUENCE)
    weight = weight.chunk(size, 0 if column else 1)[rank]
    if column:
        y = y.chunk(size, -1)[rank]
        x = x.chunk(size, 0)[rank] if exchange is LinearCollectives.COLUMN_SEQUENCE else x
    else:
        x = x.chunk(size, -1)[rank]
        y = y.chunk(size, 0)[rank] if exchange is LinearCollectives.ROW_SEQUENCE else y
    return tuple(t.clone() for t in (x, weight, y))


def linear(
    name: str,
    exchange: LinearCollectives,
    frozen: bool,
    keep: bool,
    accumulate: bool,
    length: int = S,
) -> dict[str, Any]:
    """Return the max errors of output and gradients, and the collectives of forward and
    backward."""
    x, weight, dy = _whole(length, B, K, seed=0), _whole(N, K, seed=1), _whole(length, B, N, seed=2)
    y, dx, dweight = x @ weight.t(), dy @ weight, torch.einsum("sbn,sbk->nk", dy, x)
    mine_x, mine_w, want_y = _cut(exchange, x, weight, y)
    want_dx, want_dw, mine_dy = _cut(exchange, dx, dweight, dy)
    mine_x.requires_grad_()
    mine_w.requires_grad_(not frozen)
    if accumulate:
        mine_w.main_grad = torch.ones_like(mine_w)  # type: ignore[attr-defined]
        mine_w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    way = LinearImplementation(
        fused=products(name),
        keep_gathered=keep,
        matmul_add=matmul_add_fp32 if accumulate else None,
    )
    with count_collectives() as forward:
        out = parallel_linear(mine_x, mine_w, exchange, dist.group.WORLD, way)
    kept = sorted(
        t.numel() for t in (out.grad_fn.saved_tensors if out.grad_fn else ()) if t is not None
    )
    with count_collectives() as backward:
        out.backward(mine_dy)
    assert mine_x.grad is not None
    apart = {"y": _apart(out, want_y), "dx": _apart(mine_x.grad, want_dx)}
    if frozen:
        assert mine_w.grad is None
    elif accumulate:
        assert mine_w.grad is not None
        assert mine_w.grad_added_to_main_grad  # type: ignore[attr-defined]
        apart["dw"] = _apart(mine_w.main_grad, want_dw + 1)  # type: ignore[attr-defined]
    else:
        apart["dw"] = _apart(mine_w.grad, want_dw)
    return {
        "apart": apart,
        "kept": kept,
        "forward": (dict(forward.calls), dict(forward.sent_bytes)),
        "backward": (dict(backward.calls), dict(backward.sent_bytes)),
    }


def _apart(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def overlap(name: str) -> list[str]:
    """Return the order in which slices are multiplied and their collectives start and finish."""
    events: list[str] = []
    seen = dist.all_gather_into_tensor

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def start(*args: Any, **kwargs: Any) -> Watched:
        events.append("start")
        return Watched(seen(*args, **kwargs))

    from unittest import mock

    x, matrix = _whole(8, K, seed=0), _whole(K, N, seed=1)
    with mock.patch.object(dist, "all_gather_into_tensor", start):
        products(name).all_gather_matmul(x, matrix, dist.group.WORLD)  # type: ignore[arg-type]
    return events
