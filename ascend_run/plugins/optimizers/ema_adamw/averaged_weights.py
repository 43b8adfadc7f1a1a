"""Exchange the weights of a model and their averages; imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from .optimizer import AVERAGE

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from ascend_run.plugin_api import MixedPrecisionOptimizer, ModelBundle


@torch.no_grad()
def exchange(bundle: ModelBundle) -> None:
    """Exchange the weights of a trained model, master weights included, with their averages.

    A second call restores every bit, since the model's weights are the rounded master weights.
    Before the first step there are no averages, and the weights stay. Call it on all ranks.
    """
    if bundle.optimizer is None:
        return
    chained = cast(ChainedOptimizer, bundle.optimizer).chained_optimizers
    parts = cast("list[MixedPrecisionOptimizer]", chained)
    for part in parts:
        with part.materialized():
            for parameter, state in part.optimizer.state.items():
                before = parameter.clone()
                parameter.copy_(state[AVERAGE])
                state[AVERAGE].copy_(before)
            part.refresh()
    for chunk in cast("list[DistributedDataParallel]", bundle.chunks):
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
