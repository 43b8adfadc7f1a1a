"""What an optimizer steps in place of a parameter, and whether the parameter is its copy."""

from __future__ import annotations

import torch

from ascend_run.core.checkpoint.optimizer_pieces import stepped_parameters
from ascend_run.core.checkpoint.regions import sharded_tensors
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import CheckpointError


def stale_parameters(bundle: c.ModelBundle, vocab_size: int | None) -> list[str]:
    """Parameters of this rank that are not what the optimizer has stepped, rounded: the float32
    copies of a half-precision model, or the part of it that a distributed optimizer holds here.

    An optimizer that does not say what it steps has none.
    """
    names = {
        id(held.tensor): held.regions[0].key
        for held in sharded_tensors(bundle.chunks, vocab_size=vocab_size)
        if held.regions
    }
    try:
        steps = list(stepped_parameters(bundle.optimizer))
    except CheckpointError:
        return []
    found = []
    for step in steps:
        held = step.parameter.detach()
        if step.flat_range is not None:
            held = held.reshape(-1)[slice(*step.flat_range)]
        if not torch.equal(held, step.stepped.detach().view_as(held).to(held.dtype)):
            found.append(names.get(id(step.parameter), "a parameter without a name"))
    return found
