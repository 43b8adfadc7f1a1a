"""Communication of a step as ``plan`` expects it and as ranks send it, by operation and group.

``plan`` expects balanced routing, so tokens take experts in turn. Routed by scores, ranks would
send different numbers of bytes, and gloo would pad the tokens of an expert's shards to the most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
BALANCED: Final = {"model.moe_router_force_load_balancing": True}
FEW_NUMBERS: Final = {"all_reduce": 64, "broadcast": 24}
"""Largest calls that the plan leaves out, in bytes: norms, loads of 16 experts; loss, count and
tokens of a step."""
ONE_NUMBER: Final = 8
"""The same of other operations."""
AXES: Final = {
    **{axis: (axis,) for axis in ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")},
    "dp_cp": ("dp", "cp"),
    "tp_ep": ("expt_tp", "ep"),
    "embd": ("pp",),
}


def differences(
    pool: GlooPool,
    config: Mapping[str, Any],
    plugins: Sequence[str] = (),
    *,
    ignored: Collection[str] = (),
) -> list[str]:
    """Return a sentence for each difference between expected and actual communication of four
    ranks: of the calls and of the bytes of each rank.

    Args:
        ignored: Operations that are not compared.
    """
    values = {**(BALANCED if config.get("model.num_moe_experts") else {}), **config}
    prepared, costs = planned(values, plugins, world_size=RANKS)
    layout = prepared.layout
    trial = Trial(plugins=tuple(plugins), config=values, steps=1)
    outcomes = pool.run(run_trial, RANKS, trial)
    return [
        f"rank {rank}, {sentence}"
        for rank, outcome in enumerate(outcomes)
        for sentence in _differences(
            _expected(layout, costs[layout.coordinate("pp", rank)], rank),
            _counted(layout, outcome, rank),
            ignored,
        )
    ]


def _differences(expected: Sent, counted: Sent, ignored: Collection[str]) -> Iterator[str]:
    for key in sorted(key for key in {*expected, *counted} if key[0] not in ignored):
        calls, nbytes = expected.get(key, (0.0, 0.0))
        seen, seen_bytes = counted.get(key, (0.0, 0.0))
        if abs(calls - seen) > 1e-6 or abs(nbytes - seen_bytes) > 1e-6 * nbytes:
            yield (
                f"{key[0]} over {key[1]}: {calls:g} calls and {nbytes:.10g} bytes expected, "
                f"{seen:g} and {seen_bytes:.10g} counted"
            )


def _expected(layout: Layout, cost: RankCost, rank: int) -> Sent:
    found: Sent = {}
    for collective in cost.communication:
        ranks = _ranks(layout, collective.group, rank)
        if len(ranks) > 1:
            key = _key(layout, collective.operation, ranks, rank)
            calls, nbytes = found.get(key, (0.0, 0.0))
            found[key] = calls + collective.calls, nbytes + collective.sent_bytes
    return found


def _counted(layout: Layout, outcome: RankOutcome, rank: int) -> Sent:
    found: Sent = {}
    for collective in outcome.collective_calls:
        operation = OPERATIONS.get(collective.operation)
        if operation is None or len(collective.ranks) == 1:
            continue
        if 0 < collective.nbytes <= FEW_NUMBERS.get(operation, ONE_NUMBER):
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
