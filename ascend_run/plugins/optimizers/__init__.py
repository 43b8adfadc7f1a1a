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
    import torch.distributed as dist

    found: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, _words(context))
    known = set[str]().union(*found)
    unknown = [name for name in names if name not in known]
    if unknown and context.layout.rank == 0:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        structlog.get_logger().warning(
            "optimizer.unknown_names",
            option=option,
            names=unknown,
            did_you_mean=[match for name in unknown for match in near[name]],
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
