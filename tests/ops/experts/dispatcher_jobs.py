"""The token dispatchers on a rank, against sums over each token's experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher
from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher
from ascend_run.ops.experts.chunked_all_gather import ChunkedGatherDispatcher
from ascend_run.ops.experts.chunked_dispatcher import ChunkedDispatcher
from ascend_run.ops.experts.deferred_experts import DeferredExperts
from ascend_run.ops.experts.token_dropping import token_dropping
from ascend_run.ops.experts.token_exchange import AllGather, AllToAll, Exchange
from ascend_run.testing.effects import Collectives, count_collectives
from ascend_run.testing.tensors import relative_error
from ascend_run.types.moe import ExpertWeights
from tests.support.cpu_facade import cpu_facade
from tests.support.device_reads import on_device

from .logged_computations import logged_computations

X, H, F = 4, 6, 8
"""Experts, hidden size, width of the experts."""
TOKENS = 5
"""Of each rank that dispatches."""


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def groups_of(ep: int, tp: int) -> tuple[Any, Any, Any]:
    """Return this rank's groups of experts, of tensors of an expert, and of both."""
    size = ep * tp  # ranks of one expert are neighbours
    made: list[Any] = [None, None]
    for axis, lists in enumerate(
        (
            [[t + tp * e for e in range(ep)] for t in range(tp)],
            [[t + tp * e for t in range(tp)] for e in range(ep)],
        )
    ):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                made[axis] = group
    return made[0], made[1], dist.new_group(list(range(size)))


def routing(kind: str, rank: int, tokens: int, topk: int, num_experts: int = X) -> Tensor:
    """Return the routing map; with ``dropped``, the first experts keep some of their tokens."""
    chosen = torch.zeros(tokens, num_experts, dtype=torch.bool)
    generator = torch.Generator().manual_seed(rank)
    for token in range(tokens):
        experts = {
            "spread": torch.randperm(num_experts, generator=generator)[:topk],
            "dropped": torch.arange(topk)[: (token + rank) % (topk + 1)],
            "first": torch.arange(topk),
            "last empty": torch.randperm(num_experts - 1, generator=generator)[:topk],
        }[kind]
        chosen[token, experts] = True
    return chosen


def exchanged_rows(
    ep: int, tp: int, rank: int, kind: str, topk: int, experts: slice = slice(None)
) -> tuple[int, int, int]:
    """Return the rows that a rank sends to expert-parallel ranks, receives from them, and the most
    that one of the ranks of the same experts receives; by the routing maps of all ranks.

    Args:
        experts: Those of each rank that the rows are for.
    """
    rows = []
    """Of each rank, for each expert-parallel rank."""
    for source in range(ep * tp):
        chosen = routing(kind, source, TOKENS, topk).view(TOKENS, ep, X // ep)
        rows.append(chosen[:, :, experts].sum((0, 2)).tolist())
    owner, own = divmod(rank, tp)
    received = [sum(rows[e * tp + t][owner] for e in range(ep)) for t in range(tp)]
    return sum(rows[rank]), received[own], max(received)


class SharedExpert:
    """In Megatron's parts; ``log`` has the order of what happens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.first, self.second = (draw(H, H, seed=seed).requires_grad_() for seed in (70, 71))

    def pre_forward_comm(self, x: Tensor) -> None:
        self.log.append("comm")
        self.x = x

    def linear_fc1_forward_and_act(self, *_: Tensor) -> None:
        self.hidden = logged((self.x @ self.first).tanh(), self.log, "fc1")

    def linear_fc2_forward(self, *_: Tensor) -> None:
        self.out = logged(self.hidden @ self.second, self.log, "fc2")

    def post_forward_comm(self) -> None:
        pass

    def get_output(self) -> Tensor:
        return self.out

    def plain(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.second

    def whole(self, x: Tensor) -> Tensor:
        return logged(self.plain(x), self.log, "shared")


class _Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"d{ctx.name}")
        return dx, None, None


def logged(x: Tensor, log: list[str], name: str) -> Tensor:
    """Return ``x``; its forward is logged, and its backward with a d before the name."""
    out: Tensor = _Logged.apply(x, log, name)
    return out


def logging(method: Any, log: list[str], name: str) -> Any:
    """Return the method that logs its calls."""

    def call(self: Any, *args: Any, **more: Any) -> Any:
        log.append(name)
        return method(self, *args, **more)

    return call


class HeldExperts:
    """The experts of a rank, as its module has them; [x, H, F] and [x, F, H]."""

    fc1_bias = fc2_bias = activation = None
    counts_on_device = False

    def __init__(self, fc1: Tensor, fc2: Tensor) -> None:
        self.fc1, self.fc2 = fc1, fc2
        self.compute = _compute
        self.linked: Any = self.forward

    def __call__(self, *parts: Any) -> tuple[Tensor, None]:
        out: tuple[Tensor, None] = self.linked(*parts)
        return out

    def forward(
        self,
        rows: Tensor,
        counts: Tensor,
        probs: Tensor,
        weights: ExpertWeights | None = None,
    ) -> tuple[Tensor, None]:
        weights = weights or ExpertWeights(self.fc1, self.fc2)
        return self.compute(rows, counts.tolist(), probs, weights, self.activation), None


def _compute(
    rows: Tensor, counts: Sequence[int], probs: Tensor, weights: ExpertWeights, _: object
) -> Tensor:
    parts = zip(
        rows.split([*counts]), probs.split([*counts]), weights.fc1, weights.fc2, strict=True
    )
    return torch.cat([((x @ a).tanh() * p[:, None]) @ b for x, p, a, b in parts])


Experts = Callable[[HeldExperts, Any], Any]
"""Of the forward of a rank's experts, from them and the group of their ranks."""


def _own(held: HeldExperts, _: object) -> Any:
    return held.forward


Result = tuple[dict[str, float], list[str], Collectives]


Build = Callable[[Any], Any]
"""Of a dispatcher, from what it takes over of Megatron's."""


def all_to_all(overlap: bool, fused: bool) -> Build:
    def build(inner: Any) -> AllToAllDispatcher:
        made = AllToAllDispatcher(inner, overlap=overlap, fused=fused)
        again = AllToAllDispatcher(made)
        assert (again.overlap, again.fused) == (overlap, fused)
        return again

    return build


def in_chunks(number: int, fused: bool) -> Build:
    return lambda inner: ChunkedDispatcher(AllToAllDispatcher(inner, fused=fused), number)


def errors_in_chunks(
    ep: int, tp: int, num_experts: int, number: int, fused: bool
) -> list[dict[str, float]]:
    """Return the errors of every routing, number of experts of a token, and with shared experts;
    computed chunk by chunk, and all experts at once."""
    with cpu_facade():
        groups, build = groups_of(ep, tp), in_chunks(number, fused)
        return [
            dispatched(
                groups, kind, topk, build, shared, num_experts=num_experts, by_chunk=by_chunk
            )[0]
            for kind in ("spread", "dropped", "first", "last empty")
            for topk in (1, 2)
            for shared, by_chunk in ((False, True), (True, True), (False, False))
        ]


def dispatch_in_chunks(ep: int, tp: int, kind: str, number: int, shared: bool) -> Result:
    with cpu_facade():
        build = in_chunks(number, True)
        return dispatched(groups_of(ep, tp), kind, 2, build, shared, by_chunk=True)


def errors_of_all_to_all(ep: int, tp: int, overlap: bool, fused: bool) -> list[dict[str, float]]:
    """Return the errors of every routing, number of experts of a token, and with shared experts."""
    with cpu_facade():  # gloo gathers no uneven rows
        groups, build = groups_of(ep, tp), all_to_all(overlap, fused)
        return [
            dispatched(groups, kind, topk, build, shared)[0]
            for kind in ("spread", "first", "last empty")
            for topk in (1, 2)
            for shared in (False, True)
        ]


def all_gather(number: int) -> Build:
    """Build a dispatcher that gathers the tokens in so many chunks."""
    if number == 1:
        return AllGatherDispatcher
    return lambda inner: ChunkedGatherDispatcher(inner, number)


def errors_of_all_gather(ep: int, tp: int, number: int) -> list[dict[str, float]]:
    """Return the errors of every routing, number of experts of a token, and with shared experts."""
    with cpu_facade():
        groups, build = groups_of(ep, tp), all_gather(number)
        return [
            dispatched(groups, kind, topk, build, shared, by_chunk=number > 1)[0]
            for kind in ("spread", "dropped", "first", "last empty")
            for topk in (1, 2)
            for shared in (False, True)
        ]


def dispatch(ep: int, tp: int, kind: str, overlap: bool, shared: bool) -> Result:
    """Return the largest error of the output and of each gradient, the order of events, and the
    collectives."""
    with cpu_facade():
        return dispatched(groups_of(ep, tp), kind, 2, all_to_all(overlap, True), shared)


def dispatch_gathered(ep: int, tp: int, kind: str, number: int, shared: bool) -> Result:
    with cpu_facade():
        build = all_gather(number)
        return dispatched(groups_of(ep, tp), kind, 2, build, shared, by_chunk=number > 1)


def gathered_rows(ep: int, tp: int, kind: str, topk: int) -> Tensor:
    """Return the rows that this rank's experts get of the all-gather dispatcher."""
    seen: list[Tensor] = []
    with cpu_facade():
        groups, rank = groups_of(ep, tp), dist.get_rank()
        dispatcher = AllGatherDispatcher(megatrons(groups, topk))
        chosen = routing(kind, rank, TOKENS, topk)
        probs = draw(TOKENS, X, seed=200 + rank).abs() * chosen

        def compute(rows: Tensor, *_: Tensor) -> Tensor:
            seen.append(rows)
            return rows

        through(dispatcher, draw(TOKENS, 1, H, seed=100 + rank), chosen, probs, compute)
    return seen[0]


def megatrons(
    groups: tuple[Any, Any, Any], topk: int, num_experts: int = X, **capacity: Any
) -> Any:
    """Return what a dispatcher takes over of Megatron's.

    Args:
        capacity: ``factor`` and ``pads``.
    """
    ep_group, tp_group, both = groups
    local = num_experts // ep_group.size()
    return SimpleNamespace(
        config=SimpleNamespace(
            moe_router_topk=topk,
            moe_expert_capacity_factor=capacity.get("factor"),
            moe_pad_expert_input_to_capacity=capacity.get("pads", False),
        ),
        shared_experts=None,
        ep_group=ep_group,
        tp_group=tp_group,
        tp_ep_group=both,
        local_expert_indices=list(range(ep_group.rank() * local, (ep_group.rank() + 1) * local)),
    )


def through(dispatcher: Any, x: Tensor, chosen: Tensor, probs: Tensor, compute: Any) -> Tensor:
    """Run all stages around the computation of the experts, of rows, counts and probabilities."""
    rows, weights = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    rows = dispatcher.combine_preprocess(compute(rows, counts, weights))
    out: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    return out


def through_chunks(dispatcher: Any, x: Tensor, chosen: Tensor, probs: Tensor, held: Any) -> Tensor:
    """Run all stages, the dispatcher's own computation of the experts among them."""
    rows, weights = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows = dispatcher.compute_experts(held, rows, weights)
    out: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    return out


def reads(ep: int, tp: int, cases: Sequence[tuple[float | None, bool]]) -> list[list[str]]:
    """Return what reads the device, experts included, with each factor and padding or without."""
    with cpu_facade():
        groups = groups_of(ep, tp)
        return [_reads(groups, factor, pads) for factor, pads in cases]


def _reads(groups: tuple[Any, Any, Any], factor: float | None, pads: bool) -> list[str]:
    inner = megatrons(groups, 2, factor=factor, pads=pads)
    dispatcher, rank = AllToAllDispatcher(inner), dist.get_rank()
    selected = routing("spread", rank, 5, 2)
    probs = draw(5, X, seed=200 + rank).abs() * selected
    dropping = token_dropping(2, factor, "probs", pads=pads)
    probs, chosen = (probs, selected) if dropping is None else dropping(probs, selected)
    local, width = len(inner.local_expert_indices), F // groups[1].size()
    held = HeldExperts(draw(local, H, width, seed=1), draw(local, width, H, seed=2))
    seen: list[str] = []
    x = draw(5, 1, H, seed=100 + rank)
    through(dispatcher, x, on_device(chosen, seen), probs, lambda *rows: held(*rows)[0])
    return seen


def dispatched(
    groups: tuple[Any, Any, Any],
    kind: str,
    topk: int,
    build: Build,
    shared: bool,
    experts: Experts = _own,
    num_experts: int = X,
    by_chunk: bool = False,
) -> Result:
    rank, tokens = dist.get_rank(), TOKENS
    log: list[str] = []
    ep_group, tp_group, _ = groups
    tp = tp_group.size()
    inner = megatrons(groups, topk, num_experts, factor=1.0 if kind == "dropped" else None)
    inner.shared_experts = SharedExpert(log) if shared else None
    dispatcher = build(inner)
    x = draw(tokens, 1, H, seed=100 + rank).requires_grad_()
    chosen = routing(kind, rank, tokens, topk, num_experts)
    probs = (draw(tokens, num_experts, seed=200 + rank).abs() * chosen).requires_grad_()
    full = (draw(num_experts, H, F, seed=1), draw(num_experts, F, H, seed=2))
    mine = slice(inner.local_expert_indices[0], inner.local_expert_indices[-1] + 1)
    width = slice(tp_group.rank() * F // tp, (tp_group.rank() + 1) * F // tp)
    fc1 = full[0][mine, :, width].clone().requires_grad_()
    fc2 = full[1][mine, width].clone().requires_grad_()
    dy = draw(tokens, 1, H, seed=300 + rank)
    held = HeldExperts(fc1, fc2)
    compute = experts(held, ep_group)
    held.linked = lambda *rows: (logged(compute(*rows)[0], log, "experts"), None)
    if shared and dispatcher.shared_experts is None:
        layer = SimpleNamespace(shared_experts_compute=inner.shared_experts.whole)
        dispatcher.shared_experts = DeferredExperts(layer)
        assert layer.shared_experts_compute(x) is None  # as the layer does before all stages

    undo = log_exchanges(log)
    try:
        with logged_computations(log), count_collectives() as seen:
            if by_chunk:
                out = through_chunks(dispatcher, x, chosen, probs, held)
            else:
                out = through(dispatcher, x, chosen, probs, lambda *rows: held(*rows)[0])
            out.backward(dy)
    finally:
        undo()
    errors = _errors(inner, x, probs, out, (fc1, fc2), full, (mine, width), kind, topk)
    return errors, log, seen


def log_exchanges(log: list[str]) -> Callable[[], None]:
    """Log each issue and wait; returns what undoes that."""
    kept = [(AllToAll, "issue"), (AllGather, "issue"), (Exchange, "wait")]
    plain = [getattr(kind, name) for kind, name in kept]

    for (kind, name), method in zip(kept, plain, strict=True):
        setattr(kind, name, logging(method, log, name))

    def undo() -> None:
        for (kind, name), method in zip(kept, plain, strict=True):
            setattr(kind, name, method)

    return undo


def _errors(
    inner: Any,
    x: Tensor,
    probs: Tensor,
    out: Tensor,
    weights: tuple[Tensor, Tensor],
    full: tuple[Tensor, Tensor],
    shards: tuple[slice, slice],
    kind: str,
    topk: int,
) -> dict[str, float]:
    """Compare with sums over the experts of each token, of all ranks for weights."""
    first, second = (part.clone().requires_grad_() for part in full)
    shared, own = inner.shared_experts, dist.get_rank()
    reference = SharedExpert([])
    results: dict[str, tuple[Any, Any]] = {}
    for rank in range(dist.get_world_size()):
        chosen = routing(kind, rank, x.shape[0], topk, probs.shape[1])
        its_x = draw(*x.shape, seed=100 + rank).requires_grad_()
        its_probs = (draw(*probs.shape, seed=200 + rank).abs() * chosen).requires_grad_()
        rows = []
        for token, experts in enumerate(chosen):
            total = torch.zeros(H, dtype=torch.float64)
            for expert in experts.nonzero().flatten().tolist():
                hidden = (its_x[token, 0] @ first[expert]).tanh() * its_probs[token, expert]
                total = total + hidden @ second[expert]
            rows.append(total)
        y = torch.stack(rows).unsqueeze(1)
        if shared is not None and rank == own:
            y = y + reference.plain(its_x)
        y.backward(draw(*x.shape, seed=300 + rank))
        if rank == own:
            results = {"out": (out, y), "x": (x.grad, its_x.grad)}
            results["probs"] = (probs.grad, its_probs.grad)
    if shared is not None:
        results["shared fc1"] = (shared.first.grad, reference.first.grad)
        results["shared fc2"] = (shared.second.grad, reference.second.grad)
    mine, width = shards
    assert first.grad is not None
    assert second.grad is not None
    results["fc1"] = (weights[0].grad, first.grad[mine, :, width])
    results["fc2"] = (weights[1].grad, second.grad[mine, width])
    return {name: relative_error(found, right) for name, (found, right) in results.items()}
