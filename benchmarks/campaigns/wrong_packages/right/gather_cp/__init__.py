"""Context parallelism: every rank gathers all keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    Condition,
    Manifest,
    Maturity,
    Numerics,
    SequencePartition,
    Support,
    Wrapper,
    hookimpl,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@attrs.frozen
class InOrder:
    """Each rank holds one range of the sequence."""

    multiple: int = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> Sequence[tuple[int, int]]:
        held = seq_length // size
        return [(rank * held, (rank + 1) * held)]


class GatherCp:
    """Gather keys and values over the context-parallel ranks. Numerics: another order of sums."""

    manifest = Manifest(
        name="gather-cp",
        summary="context parallelism by gathering all keys and values",
        idle=Condition.one_rank("context_parallel_size", why="one rank holds the full sequence"),
        attention=AttentionFeatures(window=True, softcap=True, unequal_widths=True),
        attention_needs=AttentionFeatures(unequal_lengths=True),
        numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL},
        level=2,
        maturity=Maturity.EXPERIMENTAL,
        requires_api=">=0,<1",
    )

    @hookimpl
    def ascend_sequence_partition(self) -> SequencePartition:
        return InOrder()

    @hookimpl
    def ascend_attention(self, groups: ProcessGroupCollection) -> Wrapper[AttentionKernel] | None:
        if groups.cp.size() == 1:
            return None
        from .kernel import GatheringKernel

        return lambda inner: GatheringKernel(inner, groups.cp)
