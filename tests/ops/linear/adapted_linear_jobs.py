"""One parallel linear with its adapter on every rank, against the formula on full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.linear.adapted_linear import Schedule, adapted_linear
from ascend_run.ops.linear.parallel_linear import LinearCollectives

S, B, K, N, R = 16, 2, 8, 24, 3
"""Full sequence, batch, inputs and outputs of the unsharded linear, rank of the adapter."""
COLUMN = (LinearCollectives.COLUMN, LinearCollectives.COLUMN_SEQUENCE)
SEQUENCE = (LinearCollectives.COLUMN_SEQUENCE, LinearCollectives.ROW_SEQUENCE)
NAMES = ("y", "dx", "dadapter_x", "da", "db")


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of linear."""

    collectives: LinearCollectives
    slices: int = 2
    merges: bool = False
    reads_another: bool = False
    """Whether the adapter reads another input than the weight."""
    length: int = S

    def schedule(self, **more: Any) -> Schedule:
        assert dist.group.WORLD is not None
        return Schedule(
            collectives=self.collectives,
            group=dist.group.WORLD,
            slices=self.slices,
            merges=self.merges,
            **more,
        )


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _formula(kind: Kind) -> dict[str, Tensor]:
    """Return inputs, output and gradients of full tensors, by autograd."""
    x, other = drawn(kind.length, B, K, seed=0), drawn(kind.length, B, K, seed=1)
    weight, a, b = drawn(N, K, seed=2), drawn(R, K, seed=3), drawn(R, N, seed=4)
    dy = drawn(kind.length, B, N, seed=5)
    for leaf in (x, other, a, b):
        leaf.requires_grad_()
    y = x @ weight.t() + (other if kind.reads_another else x) @ a.t() @ b
    y.backward(dy)
    wants = {"y": y.detach(), "dx": x.grad, "dadapter_x": other.grad, "da": a.grad, "db": b.grad}
    given = {"x": x, "other": other, "weight": weight, "a": a, "b": b, "dy": dy}
    return {n: t.detach() for n, t in {**wants, **given}.items() if t is not None}


def _cut(kind: Kind, name: str, full: Tensor) -> Tensor:
    """Return this rank's shard; gradients are cut as what they belong to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    column, shards_rows = kind.collectives in COLUMN, kind.collectives in SEQUENCE
    name = {"dx": "x", "dadapter_x": "x", "other": "x", "dy": "y", "da": "a", "db": "b"}.get(
        name, name
    )
    inside = {"x": None if column else -1, "y": -1 if column else None}
    dim = {"weight": 0 if column else 1, "a": None if column else 1, "b": 1 if column else None}
    at = {**inside, **dim}[name]
    if name in inside and at is None and shards_rows:
        at = 0
    return (full if at is None else full.chunk(size, at)[rank]).clone()


def errors(kind: Kind) -> dict[str, float]:
    """Return the max relative error of the output and of each gradient."""
    full = _formula(kind)
    mine = {name: _cut(kind, name, t) for name, t in full.items()}
    leaves = {name: mine[name].requires_grad_() for name in ("x", "other", "a", "b")}
    out = adapted_linear(
        leaves["x"],
        lambda: mine["weight"],
        leaves["a"],
        lambda: leaves["b"] * 1,
        kind.schedule(),
        adapter_x=leaves["other"] if kind.reads_another else None,
    )
    out.backward(mine["dy"])
    got = {"y": out.detach(), "dx": leaves["x"].grad, "dadapter_x": leaves["other"].grad}
    got |= {"da": leaves["a"].grad, "db": leaves["b"].grad}
    if kind.collectives in SEQUENCE:  # the replicated matrix has seen this rank's rows only
        replicated = got["da" if kind.collectives in COLUMN else "db"]
        dist.all_reduce(replicated)
    return {name: apart(got[name], mine[name]) for name in NAMES if name in mine}


def apart(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def sequence(kind: Kind) -> tuple[list[str], list[str]]:
    """Return what one rank does in forward and in backward, in order.

    ``gather``, ``scatter`` and ``reduce`` launch a collective, ``wait`` awaits it, each with its
    width: of the rank (R), the inputs (K) or the outputs (N) of this rank's shard; ``W`` is a
    matmul with the weight, ``m`` any other.
    """
    full = _formula(kind)
    mine = {name: _cut(kind, name, t) for name, t in full.items()}
    leaves = [mine[name].requires_grad_() for name in ("x", "a", "b")]
    events: list[str] = []
    width = {R: "R", mine["weight"].shape[1]: "K", mine["weight"].shape[0]: "N"}

    def matmul(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
        with_weight = sorted(mat2.shape) == sorted(mine["weight"].shape)
        events.append("W" if with_weight else "m")
        return torch.mm(input, mat2, out=out)

    with noted(events, width):
        x, a, b = leaves
        schedule = kind.schedule(matmul=matmul)
        out = adapted_linear(x, lambda: mine["weight"], a, lambda: b * 1, schedule)
        forward, events[:] = [*events], []
        out.backward(mine["dy"])
    return forward, events


@contextmanager
def noted(events: list[str], width: dict[int, str]) -> Iterator[None]:
    class Work:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def wait(self) -> None:
            events.append(f"wait {self.name}")
            self.inner.wait()

    def launched(name: str, at: int, inner: Any) -> Any:
        def start(*tensors: Tensor, **options: Any) -> Work:
            named = width[tensors[at].shape[-1]]
            events.append(f"{name} {named}")
            return Work(named, inner(*tensors, **options))

        return start

    patches = (
        ("all_gather_into_tensor", "gather", 1),
        ("reduce_scatter_tensor", "scatter", 1),
        ("all_reduce", "reduce", 0),
    )
    with mock.patch.multiple(
        dist, **{name: launched(short, at, getattr(dist, name)) for name, short, at in patches}
    ):
        yield


def merged_updates(dtype: torch.dtype) -> tuple[float, float]:
    """Return what updates of a quarter and of four units of a weight of 1 add to an output of 1."""
    assert dist.group.WORLD is not None
    how = Schedule(collectives=LinearCollectives.COLUMN, group=dist.group.WORLD, merges=True)
    eps = torch.finfo(dtype).eps
    one = torch.ones(1, 1, dtype=dtype)
    small, large = (
        adapted_linear(one, lambda: one, one * eps * factor, lambda: one, how).item() - 1
        for factor in (0.25, 4)
    )
    return small, large
