"""Parallel sizes of a config."""

from __future__ import annotations

from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .stages import virtual_size


def layout_of(config: RunConfig, world_size: int, rank: int = 0) -> Layout:
    """Return the size of every axis; ``prepare`` checks divisibility."""
    parallel = config.parallel
    return Layout(
        world_size=world_size,
        rank=rank,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        expt_tp=parallel.expert_tensor_parallel_size or 1,
        vpp=virtual_size(config),
    )
