"""Router, dispatchers and experts on a rank, against loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ascend_run.ops.experts.all_gather_dispatcher import AllGatherDispatcher
from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher
from ascend_run.ops.experts.chunked_all_gather import ChunkedGatherDispatcher
from ascend_run.ops.experts.chunked_dispatcher import ChunkedDispatcher
from ascend_run.ops.experts.exchanged_experts import (
    ExpertGroups,
    LocalDispatcher,
    exchanged_experts,
)
from ascend_run.ops.experts.hot_dispatcher import HotDispatcher
from ascend_run.ops.experts.hot_replicas import replica_link
from ascend_run.ops.experts.routing import routing_scores
from ascend_run.ops.experts.token_dropping import token_dropping
from ascend_run.testing.effects import count_collectives
from ascend_run.testing.tensors import relative_error
from ascend_run.types.moe import ExpertActivation, ExpertWeights
from tests.support.cpu_facade import cpu_facade

from .dispatcher_jobs import (
    F,
    H,
    HeldExperts,
    SharedExpert,
    X,
    draw,
    groups_of,
    log_exchanges,
)

TOKENS = 6
"""Of a rank that has any."""
LEAD: Final = 3.0
"""Of a logit over the next one: it wins, and the shares of the others are not lost beside it."""
EQUAL: Final = "equal scores"
LEVELS: Final = (
    (0, 0, 0, 0),
    (0, 1, 1, 1),
    (0, 0, 2, 2),
    (0, 0, 0, 3),
    (4, 0, 4, 0),
    (0, 0, 0, 0),
)
"""Logits of the tokens of a rank with equal scores: by the rule every expert has some of them, and
two tokens have equal shares of an expert that drops one."""


class Case(NamedTuple):
    kind: str
    topk: int
    factor: float | None
    policy: str
    pads: bool
    shared: bool


DISPATCHERS: dict[str, Callable[[Any], Any]] = {
    "alltoall": lambda inner: inner,
    "moe-alltoall": lambda inner: AllToAllDispatcher(inner, overlap=True),
    "moe-permute-fusion": lambda inner: AllToAllDispatcher(inner, fused=True),
    "allgather": lambda inner: inner,
    "moe-allgather": AllGatherDispatcher,
}
"""What replaces Megatron's dispatcher."""
EXCHANGING: Final = "moe-bmm-fused"
"""Its experts exchange their tokens, which are padded; its dispatcher only permutes."""
CHUNKED: Final = "moe-alltoall in chunks"
"""Its dispatcher computes the experts, in two chunks."""
CHUNKED_GATHER: Final = "moe-allgather in chunks"
"""The same; the chunks are of tokens."""
HOT: Final = "hot-experts"
"""Its experts have replicas, of as many as a rank has."""
OTHERS: Final[dict[str, Callable[[Any], Any]]] = {
    EXCHANGING: LocalDispatcher,
    CHUNKED: lambda inner: ChunkedDispatcher(inner, 2),
    CHUNKED_GATHER: lambda inner: ChunkedGatherDispatcher(inner, 2),
    HOT: lambda inner: HotDispatcher(inner, len(inner.local_expert_indices), lambda _: None),
}
"""Those that need the layer to call the experts differently."""


def _dispatcher(name: str, *parts: Any) -> Any:
    from megatron.core.transformer.moe import token_dispatcher

    kind = "AllGather" if "allgather" in name else "AlltoAll"
    inner = getattr(token_dispatcher, f"MoE{kind}TokenDispatcher")(*parts)
    return (DISPATCHERS | OTHERS)[name](inner)


def _cases(name: str, drops: bool) -> list[Case]:
    """Shared experts beside every other case."""
    limits: tuple[tuple[float | None, str], ...]
    one_way = dict.fromkeys(("moe-allgather", CHUNKED_GATHER, HOT), (False,))
    one_way[EXCHANGING] = (True,)
    pads: tuple[bool, ...] = one_way.get(name, (False, True))
    kinds = ["spread", "one expert", EQUAL, "last empty", "no tokens"]
    limits = ((0.6, "probs"), (0.6, "position"), (1.5, "probs"))
    overlaps = "allgather" not in name
    if not drops:
        # All ranks gather as many tokens.
        kinds += ["a rank without tokens"] if overlaps else []
        limits, pads = ((None, "probs"),), (False,)
    return [
        Case(kind, topk, *limit, padded, overlaps and topk == 2)
        for kind, topk, limit, padded in product(kinds, (1, 2), limits, pads)
    ]


def _count(kind: str, rank: int) -> int:
    """Return how many tokens a rank has."""
    return 0 if kind == "no tokens" or (kind == "a rank without tokens" and rank == 0) else TOKENS


def _capacity(case: Case, count: int) -> int:
    return count if case.factor is None else math.ceil(count * case.topk / X * case.factor)


def _logits(kind: str, rank: int) -> Tensor:
    """What is added to a token's scores: [T, X]."""
    added = torch.zeros(_count(kind, rank), X, dtype=torch.float64)
    logits = _tokens(kind, rank).flatten(0, 1) @ _router(kind).t()
    if kind == "one expert":
        added[:, 0] = logits[:, 1:].amax(1) + LEAD - logits[:, 0]
    elif kind == "last empty":
        added[:, -1] = logits[:, :-1].amin(1) - LEAD - logits[:, -1]
    elif kind == EQUAL:
        added = torch.tensor(LEVELS, dtype=torch.float64).roll(rank, 0) - logits
    return added


def _tokens(kind: str, rank: int) -> Tensor:
    x = draw(_count(kind, rank), 1, H, seed=100 + rank)
    return _rounded(x) if kind == EQUAL else x


def _router(kind: str) -> Tensor:
    weight = draw(X, H, seed=3)
    return _rounded(weight) if kind == EQUAL else weight


def _rounded(x: Tensor) -> Tensor:
    """Return whole numbers, so that sums of their products are exact; none of them is 0."""
    return x.sign() * (1 + (x.abs() > 0.7))


class Expected(NamedTuple):
    """What a layer is to compute."""

    values: dict[str, Tensor]
    """Output and gradients: of this rank's tokens, and of experts as sums over all ranks."""
    dropped: int
    """Selections of this rank's tokens that are dropped."""
    rows_X: Tensor
    """Selections that each expert keeps, of the tokens of all ranks."""


def errors(ep: int, tp: int, name: str, drops: bool) -> list[tuple[Case, Any]]:
    """Return each case with its errors, and the number of dropped selections of this rank."""
    cases = _cases(name, drops)
    # Padding changes no result.
    unpadded = dict.fromkeys(case._replace(pads=False) for case in cases)
    right = {case: _by_each_token(case) for case in unpadded}
    with cpu_facade(), _gathering():
        groups = groups_of(ep, tp)
        return [
            (case, _errors(groups, name, case, right[case._replace(pads=False)])) for case in cases
        ]


@contextmanager
def _gathering() -> Iterator[None]:
    """Give Megatron the buffer that it gathers tokens into."""
    from megatron.core import parallel_state

    parallel_state._set_global_memory_buffer()
    try:
        yield
    finally:
        parallel_state.destroy_global_memory_buffer()


def events(ep: int, tp: int, name: str) -> tuple[list[str], int]:
    """Return the order of exchanges of a padded layer, and the number of gathers."""
    log: list[str] = []
    undo = log_exchanges(log)
    try:
        with cpu_facade(), count_collectives() as seen:
            _layer(groups_of(ep, tp), name, Case("spread", 2, 0.6, "probs", True, False))
    finally:
        undo()
    return log, sum(calls for kind, calls in seen.calls.items() if "gather" in kind)


class Computed(NamedTuple):
    """What a layer computes."""

    values: dict[str, Tensor]
    dropped: int
    rows_x: list[int]
    """Rows that were multiplied by each matrix of this rank's experts, and then of its replicas."""


def _layer(groups: tuple[Any, Any, Any], name: str, case: Case) -> Computed:
    """Compute a layer, forward and backward."""
    rank, (ep_group, tp_group, both) = dist.get_rank(), groups
    local = X // ep_group.size()
    mine = range(ep_group.rank() * local, (ep_group.rank() + 1) * local)
    config = SimpleNamespace(
        add_bias_linear=False,
        num_moe_experts=X,
        moe_router_topk=case.topk,
        moe_permute_fusion=False,
        moe_router_padding_for_quantization=False,
        moe_expert_capacity_factor=case.factor,
        moe_token_drop_policy=case.policy,
        moe_pad_expert_input_to_capacity=case.pads,
        moe_shared_expert_overlap=case.shared,
        cuda_graph_impl="none",
        cuda_graph_scope=[],
    )
    collection = SimpleNamespace(ep=ep_group, expt_tp=tp_group, tp_ep=both)
    dispatcher = _dispatcher(name, local, list(mine), config, collection)
    shared = SharedExpert([]) if case.shared else None
    dispatcher.shared_experts = shared
    x = _tokens(case.kind, rank).requires_grad_()
    router = _router(case.kind).requires_grad_()
    size = F // tp_group.size()
    width = slice(tp_group.rank() * size, (tp_group.rank() + 1) * size)
    fc1 = draw(X, H, F, seed=1)[mine.start : mine.stop, :, width].clone().requires_grad_()
    fc2 = draw(X, F, H, seed=2)[mine.start : mine.stop, width].clone().requires_grad_()

    logits = x.flatten(0, 1) @ router.t() + _logits(case.kind, rank)
    probs, selected = routing_scores(logits, case.topk, "softmax", True)
    dropping = token_dropping(
        config.moe_router_topk,
        config.moe_expert_capacity_factor,
        config.moe_token_drop_policy,
        pads=config.moe_pad_expert_input_to_capacity,
    )
    assert (dropping is None) == (case.factor is None)
    probs, chosen = (probs, selected) if dropping is None else dropping(probs, selected)
    rows, weights = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    held = HeldExperts(fc1, fc2)
    rows, rows_x = _computed(name, dispatcher, held, rows, weights, ExpertGroups(*groups[:2]))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    out.backward(draw(len(x), 1, H, seed=300 + rank))
    found = {"out": out, "x": x.grad, "router": router.grad, "fc1": fc1.grad, "fc2": fc2.grad}
    if shared is not None:
        found |= {"shared fc1": shared.first.grad, "shared fc2": shared.second.grad}
    return Computed(found, int((selected & ~chosen).sum()), rows_x)


def _computed(
    name: str, dispatcher: Any, held: HeldExperts, rows: Any, weights: Any, groups: ExpertGroups
) -> tuple[Any, list[int]]:
    """Compute the experts; return what ``token_combine`` takes, and ``rows_x``."""
    computed: list[int] = []
    kernel = held.compute

    def counting(rows: Tensor, counts: Sequence[int], *rest: Any) -> Tensor:
        computed.extend(counts)
        return kernel(rows, counts, *rest)

    held.compute = counting
    if name in (CHUNKED, CHUNKED_GATHER):
        rows = dispatcher.compute_experts(held, rows, weights)
        local = len(held.fc1)
        return rows, [sum(computed[expert::local]) for expert in range(local)]
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    if name == EXCHANGING:
        own = ExpertWeights(held.fc1.transpose(1, 2), held.fc2.transpose(1, 2))
        activation = ExpertActivation(function=torch.tanh, gated=False)
        with FlopCounterMode(display=False) as flops:
            rows = exchanged_experts(rows, weights, own, activation, groups)
        # A row is multiplied by both matrices; all experts have as many.
        by_row = 2 * (held.fc1[0].numel() + held.fc2[0].numel())
        computed = [flops.get_total_flops() // (by_row * len(own.fc1))] * len(own.fc1)
    else:
        experts = replica_link(held, groups.ep).wrap(held.forward) if name == HOT else held  # type: ignore[arg-type]
        rows, _ = experts(rows, counts, weights)
    return dispatcher.combine_preprocess(rows), computed


def _errors(
    groups: tuple[Any, Any, Any], name: str, case: Case, right: Expected
) -> tuple[dict[str, float], int]:
    found = _layer(groups, name, case)
    ep_group, tp_group, _ = groups
    local, width = X // ep_group.size(), F // tp_group.size()
    mine = slice(ep_group.rank() * local, (ep_group.rank() + 1) * local)
    its = slice(tp_group.rank() * width, (tp_group.rank() + 1) * width)
    full = right.values
    own = {**full, "fc1": full["fc1"][mine, :, its], "fc2": full["fc2"][mine, its]}
    assert found.dropped == right.dropped
    _check_rows(groups, name, case, found.rows_x, right.rows_X[mine].tolist())
    assert own.keys() == found.values.keys()
    return {key: _error(key, found.values[key], own[key]) for key in own}, found.dropped


def _check_rows(
    groups: tuple[Any, Any, Any], name: str, case: Case, rows_x: list[int], routed_x: list[int]
) -> None:
    """Experts compute the rows that are routed to them, or all of their capacity, and no other."""
    if case.pads:
        capacity = _capacity(case, _count(case.kind, dist.get_rank())) * groups[2].size()
        assert rows_x == [capacity] * len(routed_x), case
    elif name == HOT:  # rows move between ranks
        sums = torch.tensor([sum(rows_x), sum(routed_x)])
        dist.all_reduce(sums)
        assert int(sums[0]) == int(sums[1]), case
        if case.kind == "one expert" and case.factor is None:  # dropped, loads may be equal
            assert len(rows_x) > len(routed_x), case
    else:
        assert rows_x == routed_x, case


def _by_each_token(case: Case) -> Expected:
    rank = dist.get_rank()
    first, second = draw(X, H, F, seed=1).requires_grad_(), draw(X, F, H, seed=2).requires_grad_()
    x, router = _tokens(case.kind, rank).requires_grad_(), _router(case.kind).requires_grad_()
    shared = SharedExpert([])
    out, selected, kept = _by_token(case, rank, x, router, first, second)
    if case.shared:
        out = out + shared.plain(x)
    out.backward(draw(len(x), 1, H, seed=300 + rank))
    named = {"x": x, "router": router, "fc1": first, "fc2": second}
    if case.shared:
        named |= {"shared fc1": shared.first, "shared fc2": shared.second}
    right = {"out": out.detach()}
    for name, leaf in named.items():
        assert leaf.grad is not None
        if leaf is first or leaf is second:
            dist.all_reduce(leaf.grad)
        right[name] = leaf.grad
        assert case.kind != EQUAL or case.factor is not None or leaf.grad.all(), (case, name)
    rows_X = torch.tensor(kept)
    dist.all_reduce(rows_X)
    return Expected(right, selected - sum(kept), rows_X)


def _error(name: str, found: Tensor, right: Tensor) -> float:
    """Return the relative error, of experts the largest of one; what is 0 is to be 0."""
    if name not in ("fc1", "fc2"):
        return relative_error(found, right)
    return max(relative_error(*pair) for pair in zip(found, right, strict=True))


def _by_token(
    case: Case, rank: int, x: Tensor, router: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, int, list[int]]:
    """Return the output of a rank's tokens, the number of their selections, and how many of them
    each expert keeps."""
    added, shares, chosen = _logits(case.kind, rank), [], []
    for token in range(len(x)):
        logits = [router[expert] @ x[token, 0] + added[token, expert] for expert in range(X)]
        exps = [(logit - max(logits).detach()).exp() for logit in logits]
        share = [each / sum(exps) for each in exps]
        shares.append(share)
        chosen.append(sorted(range(X), key=lambda e, s=share: (-float(s[e]), e))[: case.topk])
    assert case.kind != "one expert" or {experts[0] for experts in chosen} == {0}
    assert case.kind != "last empty" or not any(X - 1 in experts for experts in chosen)
    capacity, kept = _capacity(case, len(x)), []
    totals = [torch.zeros(H, dtype=torch.float64) for _ in range(len(x))]
    for expert in range(X):
        selecting = [token for token in range(len(x)) if expert in chosen[token]]
        if case.policy == "probs":
            selecting.sort(key=lambda token, e=expert: (-float(shares[token][e]), token))
        kept.append(len(selecting[:capacity]))
        for token in selecting[:capacity]:
            hidden = (x[token, 0] @ first[expert]).tanh() * shares[token][expert]
            totals[token] = totals[token] + hidden @ second[expert]
    # Everything takes part, so that nothing is without a gradient.
    nothing = 0 * (x.sum() + router.sum() + first.sum() + second.sum())
    out = (torch.stack(totals) if totals else x.flatten(1)).reshape(x.shape) + nothing
    return out, len(x) * case.topk, kept
