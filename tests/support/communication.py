"""Communication of a step as ``plan`` expects it and as ranks send it, by operation and group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ascend_run.plugin_api import Layout
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.tools.plan.cost_model.estimate import RankCost

from .costs import planned

Sent: TypeAlias = dict[tuple[str, str], tuple[float, float]]
"""(operation, group) -> calls and bytes of one rank."""

RANKS: Final = 4
OPERATIONS: Final = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
FEW_NUMBERS: Final = 64
"""Bytes that the plan leaves out: norms, losses, counts, one number for each of 16 experts."""
AXES: Final = {
    **{axis: (axis,) for axis in ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")},
    "dp_cp": ("dp", "cp"),
    "tp_ep": ("expt_tp", "ep"),
    "embd": ("pp",),
}


def differences(
    pool: GlooPool, config: Mapping[str, Any], plugins: Sequence[str] = ()
) -> list[str]:
    """Return a sentence for each difference between expected and actual communication of four
    ranks.

    Calls must be equal, and so must the bytes of a rank, averaged over the ranks of its stage,
    because the routing decides which experts get more tokens.
    """
    prepared, costs = planned(config, plugins, world_size=RANKS)
    layout = prepared.layout
    trial = Trial(plugins=tuple(plugins), config=config, steps=1)
    outcomes = pool.run(run_trial, RANKS, trial)
    return [
        sentence
        for stage, cost in enumerate(costs)
        for sentence in _differences(
            stage,
            _expected(layout, cost, stage),
            _mean([_counted(layout, outcomes[rank], rank) for rank in _of(layout, stage)]),
        )
    ]


def _differences(stage: int, expected: Sent, counted: Sent) -> Iterator[str]:
    for key in sorted({*expected, *counted}):
        calls, nbytes = expected.get(key, (0.0, 0.0))
        seen, seen_bytes = counted.get(key, (0.0, 0.0))
        if abs(calls - seen) > 1e-6 or abs(nbytes - seen_bytes) > 1e-6 * nbytes:
            yield (
                f"stage {stage}, {key[0]} over {key[1]}: {calls:g} calls and {nbytes:g} bytes "
                f"expected, {seen:g} and {seen_bytes:g} counted"
            )


def _expected(layout: Layout, cost: RankCost, stage: int) -> Sent:
    first = _of(layout, stage)[0]
    found: Sent = {}
    for collective in cost.communication:
        ranks = _ranks(layout, collective.group, first)
        if len(ranks) > 1:
            key = _key(layout, collective.operation, ranks, first)
            calls, nbytes = found.get(key, (0.0, 0.0))
            found[key] = calls + collective.calls, nbytes + collective.sent_bytes
    return found


def _counted(layout: Layout, outcome: RankOutcome, rank: int) -> Sent:
    found: Sent = {}
    for collective in outcome.collective_calls:
        operation = OPERATIONS.get(collective.operation)
        if operation is None or len(collective.ranks) == 1 or collective.nbytes <= FEW_NUMBERS:
            continue
        key = _key(layout, operation, collective.ranks, rank)
        calls, nbytes = found.get(key, (0.0, 0.0))
        found[key] = calls + 1, nbytes + collective.nbytes
    return found


def _key(layout: Layout, operation: str, ranks: Sequence[int], rank: int) -> tuple[str, str]:
    """Return the key of a group by all its names in the layout; two axes may have the same groups.
    Sends between ranks ignore the group."""
    # With two stages, sends in one direction use a group of all ranks, to avoid deadlocks.
    if operation == "send":
        return operation, "pp"
    names = [name for name in AXES if set(_ranks(layout, name, rank)) == set(ranks)]
    return operation, " ".join(names) or str(ranks)


def _ranks(layout: Layout, group: str, rank: int) -> tuple[int, ...]:
    ranks = next(tuple(found) for found in layout.groups(*AXES[group]) if rank in found)
    return (ranks[0], ranks[-1]) if group == "embd" and len(ranks) > 1 else ranks


def _of(layout: Layout, stage: int) -> list[int]:
    return [rank for rank in range(RANKS) if layout.coordinate("pp", rank) == stage]


def _mean(found: Sequence[Sent]) -> Sent:
    keys = {key for sent in found for key in sent}
    return {
        key: (
            sum(sent.get(key, (0, 0))[0] for sent in found) / len(found),
            sum(sent.get(key, (0, 0))[1] for sent in found) / len(found),
        )
        for key in keys
    }
