"""How many forwards wait for their backward: Megatron's pipeline schedules, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.layout import Layout

_GROUPS = 4
"""Groups of micro-batches after which an interleaved schedule has shown its peak."""


class Waiting(NamedTuple):
    """A backward about to begin."""

    chunk: int
    """Whose backward it is."""
    forwards: Mapping[int, int]
    """Chunk -> forwards that wait for their backward, this one's with them."""


def in_flight(
    config: RunConfig, layout: Layout, pp_rank: int, num_micro_batches: int
) -> list[Waiting]:
    """The backwards that may be the peak; no two are the same."""
    if layout.pp == 1:
        return [Waiting(0, {0: 1})]
    if layout.vpp is None:
        return [Waiting(0, {0: min(num_micro_batches, layout.pp - pp_rank)})]
    group = config.parallel.microbatch_group_size_per_vp_stage or layout.pp
    return _interleaved(layout, pp_rank, num_micro_batches, group)


def _interleaved(layout: Layout, pp_rank: int, num_micro_batches: int, group: int) -> list[Waiting]:
    """``forward_backward_pipelining_with_interleaving``: warm-up forwards, one forward and one
    backward in turn, and the backwards that are left."""
    chunks = layout.vpp or 1
    shown = min(num_micro_batches, _GROUPS * group)
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


def _chunk_order(num_micro_batches: int, group: int, chunks: int) -> Iterator[int]:
    """The chunk of each forward, in order; backwards come in the same order, last chunk first."""
    for start in range(0, num_micro_batches, group):
        size = min(group, num_micro_batches - start)
        for chunk in range(chunks):
            yield from (chunk for _ in range(size))
