"""Dispatch with replicas of hot experts on a rank, against sums over each token's experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.ops.experts.all_to_all_dispatcher import AllToAllDispatcher
from ascend_run.ops.experts.hot_dispatcher import HotDispatcher
from ascend_run.ops.experts.hot_experts import HotChoice
from ascend_run.ops.experts.hot_replicas import Replication, replica_link
from ascend_run.testing.effects import count_operations
from tests.support.cpu_facade import cpu_facade

from .dispatcher_jobs import TOKENS, HeldExperts, dispatched, groups_of, logged, logging, routing

COPYING: Final = ("cat", "index", "index_select", "split_with_sizes")


@attrs.frozen
class Outcome:
    """A dispatch on one rank."""

    errors: Mapping[str, float]
    """Of the output and of each gradient."""
    choice: HotChoice
    counts: Sequence[Sequence[int]]
    """Rows of each rank for each expert, as the dispatcher has them afterwards."""
    computed: Sequence[int]
    """Rows of this rank's experts, and of replicas."""
    calls: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    log: Sequence[str]
    """Order of events of replicas and of experts."""


def outcomes(
    ep: int, runs: Sequence[tuple[str, int, int]], *, overlap: bool = False, shared: bool = False
) -> list[Outcome]:
    """Return the outcome of each run: a routing, the experts of a token, and the hot experts."""
    with cpu_facade():
        groups = groups_of(ep, 1)
        return [_outcome(groups, *run, overlap, shared) for run in runs]


def _outcome(
    groups: tuple[Any, Any, Any], kind: str, topk: int, num_hot: int, overlap: bool, shared: bool
) -> Outcome:
    choices: list[HotChoice] = []
    made: list[HotDispatcher] = []
    computed: list[int] = []
    log: list[str] = []

    def build(inner: Any) -> HotDispatcher:
        plain = AllToAllDispatcher(inner, overlap=overlap, fused=overlap)
        made.append(HotDispatcher(plain, num_hot, choices.append))
        return made[0]

    def experts(held: HeldExperts, group: dist.ProcessGroup) -> Any:
        kernel = held.compute

        def compute(rows: Tensor, *rest: Any) -> Tensor:
            name = "replicas" if computed else "own"
            computed.append(len(rows))
            return logged(kernel(rows, *rest), log, name)

        held.compute = compute
        return replica_link(held, group).wrap(held.forward)  # type: ignore[arg-type]

    plain = {name: getattr(Replication, name) for name in ("broadcast", "reduce", "wait")}
    for name, method in plain.items():
        setattr(Replication, name, logging(method, log, name))
    try:
        found = dispatched(groups, kind, topk, build, shared, experts)
    finally:
        for name, method in plain.items():
            setattr(Replication, name, method)
    return Outcome(
        errors=found[0],
        choice=choices[0],
        counts=made[0].counts_EPX.squeeze(1).tolist(),
        computed=computed,
        calls=dict(found[2].calls),
        sent_bytes=dict(found[2].sent_bytes),
        log=log,
    )


def copying(ep: int, kind: str, topk: int, num_hot: int) -> list[dict[str, int]]:
    """Return the operations of a dispatch that copy rows: without this dispatcher, and with it."""
    builds = [AllToAllDispatcher, lambda inner: HotDispatcher(inner, num_hot, lambda _: None)]
    counted = []
    with cpu_facade():
        groups = groups_of(ep, 1)
        for build in builds:
            with count_operations() as operations:
                dispatched(groups, kind, topk, build, False)
            counted.append({name: operations[name] for name in COPYING})
    return counted


def counts_of(ep: int, kind: str, topk: int) -> list[list[int]]:
    """Return the rows that each rank has for each expert."""
    return [routing(kind, rank, TOKENS, topk).sum(0).tolist() for rank in range(ep)]
