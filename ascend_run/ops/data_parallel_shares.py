"""The parameters of which a rank has the optimizer's states, as ``plan`` counts them. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.types.config import RunConfig
from ascend_run.types.cost import ParameterCost, PipelineStage
from ascend_run.types.layout import Layout


def data_parallel_shares(
    config: RunConfig, layout: Layout, rank: PipelineStage
) -> Iterator[tuple[list[ParameterCost], int]]:
    """Yield the trained parameters of a pipeline stage that are replicated on the same ranks, once
    those of experts and once all others; and among how many ranks the distributed optimizer shards
    them, 1 without it."""
    shards = config.ddp.use_distributed_optimizer
    for is_expert, replicas in ((False, layout.dp * layout.cp), (True, layout.expt_dp)):
        found = [p for p in rank.parameters if p.trained and p.is_expert is is_expert]
        yield found, replicas if shards else 1
