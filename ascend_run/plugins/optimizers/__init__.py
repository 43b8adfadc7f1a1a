"""Optimizers beside the built-in AdamW."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from ascend_run.ops.data_parallel_shares import data_parallel_shares
from ascend_run.plugin_api import CostChange, Phase, WorkingMemory

if TYPE_CHECKING:
    from ascend_run.plugin_api import Layout, PipelineStage, RunConfig, RunContext

_COPIES: Final = 2 * 4
"""Bytes per element of both moments in float32."""


def adamw_options(config: RunConfig) -> dict[str, Any]:
    """Return a run's options of AdamW, by the names that torch's optimizers have for them."""
    options = config.optimizer
    return {
        "lr": options.lr,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_eps,
        "weight_decay": options.weight_decay,
    }


def cost_of_chunks(
    config: RunConfig,
    layout: Layout,
    rank: PipelineStage,
    chunk: int,
    *,
    to_begin: int,
    most: int,
) -> CostChange:
    """Return what an update of one parameter takes, chunk by chunk on copies of its moments.

    Args:
        chunk: Elements of a chunk.
        to_begin: Bytes per element until the copies are made, while those of the last chunk exist.
        most: Bytes per element of a chunk.
    """
    elements = _largest(config, layout, rank)
    first = min(elements, chunk)
    following = min(elements - first, chunk)
    nbytes = max(most * first, _COPIES * first + to_begin * following)
    working = WorkingMemory(part="optimizer", name="moments", nbytes=nbytes, phase=Phase.UPDATE)
    return CostChange(working=(working,))


def _largest(config: RunConfig, layout: Layout, rank: PipelineStage) -> float:
    """Return the elements of the largest parameter of a rank, or of its share of all of them."""
    found = 0.0
    for parameters, shards in data_parallel_shares(config, layout, rank):
        numels = [p.numel for p in parameters]
        found = max(found, min(sum(numels) / shards, max(numels, default=0)))
    return found


def warn_of_unknown_names(option: str, names: Collection[str], context: RunContext) -> None:
    """Log which of an option's names no parameter has that trains, on any rank, nor a module that
    holds one. A collective of all ranks.

    What is called so is known when the models are built, and a name may be that of another
    plugin's parameters, so planning takes any.
    """
    if not names:
        return
    import structlog
    import torch
    import torch.distributed as dist

    words = _words(context)
    found = torch.tensor([name in words for name in names], device=context.device.torch_device)
    found = found.int()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    unknown = [name for name, is_there in zip(names, found.tolist(), strict=True) if not is_there]
    if unknown and context.layout.rank == 0:
        # Of the names of this rank's stage.
        near = [match for name in unknown for match in difflib.get_close_matches(name, words, n=1)]
        structlog.get_logger().warning(
            "optimizer.unknown_names", option=option, names=unknown, did_you_mean=near
        )


def _words(context: RunContext) -> set[str]:
    return {
        word
        for model in context.models.values()
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
        for word in name.split(".")
    }
