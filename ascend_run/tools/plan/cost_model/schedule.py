"""Number of forwards in flight in Megatron's pipeline schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

_GROUPS = 4
"""Number of groups of micro-batches within which an interleaved schedule reaches its peak."""


class Waiting(NamedTuple):
    """The state of a schedule before a backward."""

    chunk: int
    """The chunk whose backward is next."""
    forwards: Mapping[int, int]
    """Chunk -> forwards in flight, including that of this backward."""


def in_flight(
    config: RunConfig, layout: Layout, pp_rank: int, num_microbatches: int
) -> list[Waiting]:
    """Return the distinct states that may be the peak."""
    if layout.pp == 1:
        return [Waiting(0, {0: 1})]
    if layout.vpp is None:
        return [Waiting(0, {0: min(num_microbatches, layout.pp - pp_rank)})]
    group = config.parallel.microbatch_group_size_per_vp_stage or layout.pp
    return _interleaved(layout, pp_rank, num_microbatches, group)


def reused_forwards(waiting: Sequence[Waiting], num_microbatches: int, *, prefetched: bool) -> int:
    """Return of how many forwards of a step the layer that ran last is still on the device when its
    backward begins, so that it is not copied back: a copy is freed when the next forward begins,
    unless its backward is next and that is known. 0 in a virtual pipeline, where most are freed.

    Args:
        waiting: From ``in_flight``.
        prefetched: Whether the order of the backwards is used to keep what is needed next.
    """
    if len(waiting) > 1:
        return 0
    at_once = 2 if prefetched else 1
    return num_microbatches if sum(waiting[0].forwards.values()) <= at_once else at_once


def _interleaved(layout: Layout, pp_rank: int, num_microbatches: int, group: int) -> list[Waiting]:
    """``forward_backward_pipelining_with_interleaving``: warm-up, 1F1B and cool-down phases."""
    chunks = layout.vpp or 1
    shown = min(num_microbatches, _GROUPS * group)
    order = list(_chunk_order(shown, group, chunks))
    total = len(order)
    warm_up = min(total, (layout.pp - pp_rank - 1) * 2 + (chunks - 1) * group)
    waiting: Counter[int] = Counter(order[:warm_up])
    found: dict[tuple[int, tuple[tuple[int, int], ...]], Waiting] = {}
    for position in range(total):
        if warm_up + position < total:
            waiting[order[warm_up + position]] += 1
        chunk = chunks - 1 - order[position]
        key = chunk, tuple(sorted(waiting.items()))
        found.setdefault(key, Waiting(chunk, dict(waiting)))
        waiting[chunk] -= 1
    return list(found.values())


def _chunk_order(num_microbatches: int, group: int, chunks: int) -> Iterator[int]:
    """The chunk of each forward, in order; backwards run in the same order, last chunk first."""
    for start in range(0, num_microbatches, group):
        size = min(group, num_microbatches - start)
        for chunk in range(chunks):
            yield from (chunk for _ in range(size))
