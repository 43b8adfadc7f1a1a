"""Messages of a step as ``plan`` expects them and as ranks send them, by operation and group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ascend_run.core.cost.estimate import RankCost
from ascend_run.plugin_api import Layout
from ascend_run.plugin_api.testing.pool import GlooPool
from ascend_run.plugin_api.testing.runtime import RankOutcome, Trial, run_trial

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
"""Bytes of what the plan leaves out: norms, losses, counts, one number for each of 16 experts."""
AXES: Final = {
    **{axis: (axis,) for axis in ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")},
    "dp_cp": ("dp", "cp"),
    "tp_ep": ("expt_tp", "ep"),
    "embd": ("pp",),
}


def differences(
    pool: GlooPool, config: Mapping[str, Any], plugins: Sequence[str] = ()
) -> list[str]:
    """Where a step of four ranks sends something else than was expected; a sentence each.

    Calls must be equal, and so must the bytes of a rank, averaged over the ranks of its stage:
    which experts get more tokens is the routing's affair.
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
    for message in cost.messages:
        ranks = _ranks(layout, message.group, first)
        if len(ranks) > 1:
            key = _key(layout, message.operation, ranks, first)
            calls, nbytes = found.get(key, (0.0, 0.0))
            found[key] = calls + message.calls, nbytes + message.sent_bytes
    return found


def _counted(layout: Layout, outcome: RankOutcome, rank: int) -> Sent:
    found: Sent = {}
    for message in outcome.messages:
        operation = OPERATIONS.get(message.operation)
        if operation is None or len(message.ranks) == 1 or message.nbytes <= FEW_NUMBERS:
            continue
        key = _key(layout, operation, message.ranks, rank)
        calls, nbytes = found.get(key, (0.0, 0.0))
        found[key] = calls + 1, nbytes + message.nbytes
    return found


def _key(layout: Layout, operation: str, ranks: Sequence[int], rank: int) -> tuple[str, str]:
    """A group by every name that it has in the layout; two axes may have the same groups. Of a
    message from rank to rank it does not matter."""
    # Two stages send over all ranks one way, so that two messages do not wait for each other.
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
