"""Optimizers beside the built-in AdamW."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunContext


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
