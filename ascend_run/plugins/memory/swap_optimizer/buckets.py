"""Which parameters are updated together, and how many of them are on the device. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.plugin_api import Layout, ParameterCost, PipelineStage, RunConfig

OVERLAPPED: Final = 3
"""Buckets on the device: one is updated, while the next one arrives and the last one leaves."""


def buckets(numels: Sequence[int], limit: int) -> Iterator[range]:
    """Yield the positions of each bucket: as many as have at most ``limit`` elements, or one."""
    start, total = 0, 0
    for position, numel in enumerate(numels):
        if position > start and total + numel > limit:
            yield range(start, position)
            start, total = position, 0
        total += numel
    if numels:
        yield range(start, len(numels))


def elements_at_once(
    config: RunConfig, layout: Layout, rank: PipelineStage, bucket_size: int, at_once: int
) -> float:
    """Return the elements of the largest buckets that are on the device together. A rank of a
    distributed optimizer has a range of all parameters: most that it has are whole.

    Args:
        at_once: How many are.
    """
    spread = config.ddp.use_distributed_optimizer
    most = 0.0
    for is_expert, ranks in ((False, layout.dp * layout.cp), (True, layout.expt_dp)):
        own = [p for p in rank.parameters if p.trained and p.is_expert is is_expert]
        # Parameter groups with weight decay come first: those of matrices.
        numels = [p.numel for p in sorted(own, key=_is_vector)]
        held = sum(numels) / (ranks if spread else 1)
        totals = [sum(numels[at] for at in bucket) for bucket in buckets(numels, bucket_size)]
        windows = (sum(totals[at : at + at_once]) for at in range(len(totals)))
        most = max(most, min(held, max(windows, default=0)))
    return most


def _is_vector(parameter: ParameterCost) -> bool:
    # The cost counts embedding tables as no matrices, since they are used in no matmul.
    return not (parameter.is_matrix or parameter.name.endswith("_embeddings"))
