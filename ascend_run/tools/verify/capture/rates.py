"""Weight decay and learning rate of each parameter, as the optimizer's groups have them."""

from __future__ import annotations

from typing import Any

from ascend_run.core.checkpoint.optimizer_shards import stepped_parameters
from ascend_run.core.checkpoint.regions import sharded_tensors
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.testing.dry_run import DryRun


def watched_rates(dry_run: DryRun) -> dict[str, list[float]]:
    """Start recording; return parameter -> its weight decay, and its learning rate in each step so
    far. Empty if the optimizer does not expose its groups.

    Parameters that a rank of a distributed optimizer has no shard of are missing there.
    """
    bundle, vocab_size = dry_run.bundle, dry_run.context.config.model.vocab_size
    optimizer: Any = bundle.optimizer
    inner = optimizer.step
    names = {
        id(held.tensor): held.regions[0].key
        for held in sharded_tensors(bundle.chunks, vocab_size=vocab_size)
        if held.regions
    }
    rates: dict[str, list[float]] = {}

    def step() -> Any:
        for name, group in _groups(optimizer, names).items():
            rates.setdefault(name, [float(group["weight_decay"])]).append(float(group["lr"]))
        return inner()

    optimizer.step = step
    return rates


def _groups(optimizer: Any, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Return the group of each parameter, by name."""
    try:
        steps = list(stepped_parameters(optimizer))
    except CheckpointError:
        return {}
    groups = {
        id(tensor): group
        for inner in {id(step.inner): step.inner for step in steps}.values()
        for group in inner.param_groups
        for tensor in group["params"]
    }
    return {names[id(step.parameter)]: groups[id(step.stepped)] for step in steps}
