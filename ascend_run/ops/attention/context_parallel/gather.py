"""The route by all-gather: every rank gathers the keys and values of all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.types.attention import Mask, SequencePartition

from .gathered_blocks import GatheredBlock, GatheredWork, gathered_work
from .gathered_keys import GatheredKeys, GatheredSums
from .options import KvCache
from .route import RankKeys, RoutedBlock

_OWN_READ: Final = {"none": ("k", "v"), "half": ("v",), "full": ()}


class GatherRoute:
    """A route.KeyRoute that gathers others' keys while a rank attends to its own.

    The rank then attends to the gathered keys that its mask leaves visible. Backward gathers again
    what was not saved, and reduce-scatters the gradients of all ranks' keys. With heads in several
    parts, the all-gather of the next part and the reduce-scatter of the previous one overlap with
    the computation of a part.

    Args:
        group: Ranks that share a sequence.
        groups_at_once: Key-value heads of one part; None is all of them.
        kv_cache: Which of the other ranks' keys and values are saved for backward.

    Communication: forward one all-gather a part; backward one, unless both are saved, and one
    reduce-scatter.
    Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2. Overlapping with a rank's
    own keys, and heads in parts, are additions of ascend-run.
    """

    max_blocks = 2**20
    """Up to one block per document, for each part of the heads."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        partition: SequencePartition,
        *,
        groups_at_once: int | None = None,
        kv_cache: KvCache = "none",
    ) -> None:
        self.group, self.partition = group, partition
        self.groups_at_once, self.kv_cache = groups_at_once, kv_cache
        self.rank, self.size = group.rank(), group.size()
        self.reads = frozenset(_OWN_READ[kv_cache])

    def work(self, mask: Mask, num_queries: int, num_keys: int, placed: bool) -> GatheredWork:
        lengths = num_queries, num_keys
        return gathered_work(mask, self.partition, *lengths, self.rank, self.size, placed)

    def forward(self, work: GatheredWork, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        gathered, sums = GatheredKeys(keys.own, self.group), GatheredSums(self.group)
        for part in range(len(keys.own)):
            yield _own_then_others(work, gathered, sums, part)
            keys.saved.extend(gathered.keep(self.kv_cache))

    def backward(self, work: GatheredWork, keys: RankKeys) -> Iterator[Iterator[RoutedBlock]]:
        num_saved = 1 if self.kv_cache == "half" else 2
        known = [of_part[:num_saved] for of_part in keys.shapes if keys.saved]
        gathered = GatheredKeys(keys.own, self.group, kept=keys.saved, shapes=known)
        sums = GatheredSums(self.group)
        for part, shapes in enumerate(keys.shapes):
            sums.begin(shapes, keys.like)
            yield _own_then_others(work, gathered, sums, part)
            sums.send()
        keys.gradients.extend(sums.result())


def _own_then_others(
    work: GatheredWork, gathered: GatheredKeys, sums: GatheredSums, part: int
) -> Iterator[RoutedBlock]:
    """Yield blocks of this rank's own keys, then of all gathered keys."""
    order = itertools.count(part * (len(work.own) + len(work.others)))
    own = {work.rank: gathered.own(part)}
    for found in work.own:
        yield _routed_block(found, own, sums, 0, next(order))
    all_ranks = gathered.all(part)
    for found in work.others:
        yield _routed_block(found, all_ranks, sums, 1, next(order))


def _routed_block(
    found: GatheredBlock,
    of_rank: Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]],
    sums: GatheredSums,
    step: int,
    order: int,
) -> RoutedBlock:
    """Build a routed block, with its keys [T, B, g, D] and values [T, B, g, E], stored heads
    first."""
    runs = [[x[source.rows] for x in of_rank[source.rank]] for source in found.sources]
    keys, values = runs[0]
    if len(runs) > 1:
        keys, values = (
            torch.cat([x.movedim(0, -2) for x in which], -2).movedim(-2, 0)
            for which in zip(*runs, strict=True)
        )
    add = functools.partial(sums.add, found.sources)
    return RoutedBlock(block=found.block, keys=keys, values=values, step=step, order=order, add=add)
