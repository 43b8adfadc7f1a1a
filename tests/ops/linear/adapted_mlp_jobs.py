"""An MLP with adapters on every rank, against the formula on full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ascend_run.ops.linear.adapted_linear import Schedule
from ascend_run.ops.linear.adapted_mlp import AdaptedMlp, MlpLinear, adapted_mlp
from ascend_run.ops.linear.parallel_linear import LinearCollectives

from .adapted_linear_jobs import apart, drawn, noted

S, B, HIDDEN, WIDTH, R1, R2 = 16, 2, 8, 12, 3, 5
"""Sequence, batch, hidden size, width between the linears, ranks of the adapters."""
DROPOUT: Final = 0.25
LEAVES: Final = ("x", "a1", "b1", "a2", "b2")
OVER_RANKS: Final[Mapping[str, tuple[LinearCollectives, LinearCollectives]]] = {
    "none": (LinearCollectives.NONE, LinearCollectives.NONE),
    "tensors": (LinearCollectives.COLUMN, LinearCollectives.ROW),
    "sequence": (LinearCollectives.COLUMN_SEQUENCE, LinearCollectives.ROW_SEQUENCE),
}


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of MLP."""

    over: str = "sequence"
    slices: int = 1
    merges: bool = False
    drops: bool = False


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def formula(kind: Kind) -> dict[str, Tensor]:
    """Return inputs, output and gradients of full tensors, by autograd."""
    shapes = {
        "x": (S * B, HIDDEN), "w1": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH),
        "a1": (R1, HIDDEN), "b1": (R1, 2 * WIDTH), "a2": (R2, WIDTH), "b2": (R2, HIDDEN),
        "bias": (2 * WIDTH,), "dy": (S * B, HIDDEN),
        "drop1": (S * B, HIDDEN), "drop2": (S * B, WIDTH),
    }  # fmt: skip
    full = {name: drawn(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    for name in ("drop1", "drop2"):  # by so much an element is multiplied
        kept = (full[name] > -0.7).double() / (1 - DROPOUT)
        full[name] = kept if kind.drops else torch.ones_like(kept)
    x, a1, b1, a2, b2 = (full[name].requires_grad_() for name in LEAVES)
    hidden = x @ full["w1"].t() + (x * full["drop1"]) @ a1.t() @ (2 * b1) + full["bias"]
    product = swiglu(hidden)
    y = product @ full["w2"].t() + (product * full["drop2"]) @ a2.t() @ (2 * b2)
    y.backward(full["dy"])
    gradients = {f"d{name}": full[name].grad for name in LEAVES}
    return {n: t.detach() for n, t in {**full, **gradients, "y": y}.items() if t is not None}


def cut(kind: Kind, name: str, full: Tensor) -> Tensor:
    """Return this rank's shard; gradients are cut as what they belong to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind.over == "none":
        return full.clone()
    name = {"dy": "x", "y": "x", "drop1": "x"}.get(name, name)
    name = name if name == "drop2" else name.removeprefix("d")
    if name in ("w1", "b1", "bias"):  # gate and up each
        dim = 1 if name == "b1" else 0
        return torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)
    dims = {"w2": 1, "a2": 1, "drop2": 1, "x": 0 if kind.over == "sequence" else None}
    at = dims.get(name)
    return (full if at is None else full.chunk(size, at)[rank]).clone()


def built(kind: Kind, mine: Mapping[str, Tensor], **more: Any) -> AdaptedMlp:
    group = dist.group.WORLD
    assert group is not None
    collectives = OVER_RANKS[kind.over]

    def linear(number: int) -> MlpLinear:
        schedule = Schedule(
            collectives=collectives[number - 1],
            group=group,
            slices=kind.slices,
            merges=kind.merges,
            **more,
        )

        def dropped(ones: Tensor) -> Tensor:
            return ones * mine[f"drop{number}"]

        return MlpLinear(
            make_weight_NK=lambda: mine[f"w{number}"],
            a_RK=mine[f"a{number}"],
            parts=[mine[f"b{number}"]],
            make_b_RN=lambda parts: 2 * parts[0],
            schedule=schedule,
            dropped=dropped,
            dropout=DROPOUT if kind.drops else 0.0,
        )

    return AdaptedMlp(fc1=linear(1), fc2=linear(2), activation=swiglu, bias_N=mine["bias"])


def errors(kind: Kind) -> dict[str, float]:
    """Return the max relative error of the output and of each gradient, and the elements saved for
    backward without parameters (``saved``)."""
    mine = {name: cut(kind, name, full) for name, full in formula(kind).items()}
    leaves = {name: mine[name].requires_grad_() for name in LEAVES}
    parameters = {mine[name].data_ptr() for name in (*LEAVES[1:], "w1", "w2")}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    rows = leaves["x"].unflatten(0, (-1, B))
    mlp = built(kind, mine)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = adapted_mlp(rows, mlp)
    out.backward(mine["dy"].view(out.shape))
    found = {"y": out.detach().flatten(0, 1)}
    found |= {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    if kind.over == "sequence":  # the replicated matrices have seen this rank's rows only
        for name in ("da1", "db2"):
            dist.all_reduce(found[name])
    return {n: apart(got, mine[n]) for n, got in found.items()} | {"saved": sum(saved.values())}


def sequence(kind: Kind) -> tuple[list[str], list[str]]:
    """Return the collectives of one rank in forward and in backward, and when each is awaited; of
    the hidden size (H) or of an adapter (R1, R2)."""
    mine = {name: cut(kind, name, full) for name, full in formula(kind).items()}
    for name in LEAVES:
        mine[name].requires_grad_()
    events: list[str] = []
    with noted(events, {R1: "R1", R2: "R2", HIDDEN: "H"}):
        out = adapted_mlp(mine["x"].unflatten(0, (-1, B)), built(kind, mine))
        forward, events[:] = [*events], []
        out.backward(mine["dy"].view(out.shape))
    return forward, events
