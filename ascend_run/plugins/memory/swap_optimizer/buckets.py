"""How many of the parameters that are updated together are on the device. No torch."""

from __future__ import annotations

from typing import Final

from ascend_run.ops.data_parallel_shares import data_parallel_shares
from ascend_run.ops.optimizer_buckets import buckets
from ascend_run.plugin_api import Layout, ParameterCost, PipelineStage, RunConfig

OVERLAPPED: Final = 3
"""Buckets on the device: one is updated, while the next one arrives and the last one leaves."""


def elements_at_once(
    config: RunConfig, layout: Layout, rank: PipelineStage, bucket_size: int, at_once: int
) -> float:
    """Return the elements of the largest buckets that are on the device together. A rank of a
    distributed optimizer has a range of all parameters: most that it has are whole.

    Args:
        at_once: How many are.
    """
    most = 0.0
    for parameters, shards in data_parallel_shares(config, layout, rank):
        # Parameter groups with weight decay come first: those of matrices.
        numels = [p.numel for p in sorted(parameters, key=_is_vector)]
        held = sum(numels) / shards
        totals = [sum(numels[at] for at in bucket) for bucket in buckets(numels, bucket_size)]
        windows = (sum(totals[at : at + at_once]) for at in range(len(totals)))
        most = max(most, min(held, max(windows, default=0)))
    return most


def _is_vector(parameter: ParameterCost) -> bool:
    # The cost counts embedding tables as no matrices, since they are used in no matmul.
    return not (parameter.is_matrix or parameter.name.endswith("_embeddings"))
