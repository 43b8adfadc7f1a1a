"""Check that parameters are equal to the optimizer's master weights."""

from __future__ import annotations

import torch

from ascend_run.core.checkpoint.optimizer_shards import materialized, stepped_parameters
from ascend_run.core.checkpoint.regions import sharded_tensors
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import CheckpointError


def stale_parameters(bundle: c.ModelBundle, vocab_size: int | None) -> tuple[list[str], int]:
    """Return the names of this rank's parameters that are not equal to their rounded master
    weights: float32 copies of a half-precision model, or the shards of a distributed optimizer.
    Also return the number of parameters that have such a copy.

    Empty and 0 if the optimizer does not expose its master weights.
    """
    names = {
        id(held.tensor): held.regions[0].key
        for held in sharded_tensors(bundle.chunks, vocab_size=vocab_size)
        if held.regions
    }
    try:
        steps = list(stepped_parameters(bundle.optimizer))
    except CheckpointError:
        return [], 0
    with materialized(bundle.optimizer):
        found = [names.get(id(s.parameter), "a parameter without a name") for s in steps if _old(s)]
        num_copies = sum(_address(step.stepped) != _address(step.parameter) for step in steps)
    return found, num_copies


def _old(step: c.SteppedParameter) -> bool:
    held = step.parameter.detach()
    if step.flat_range is not None:
        held = held.reshape(-1)[slice(*step.flat_range)]
    return not torch.equal(held, step.stepped.detach().view_as(held).to(held.dtype))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
