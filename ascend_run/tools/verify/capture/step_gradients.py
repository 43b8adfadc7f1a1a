"""Record the gradients of every optimizer step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ascend_run.core.checkpoint.optimizer_shards import is_distributed, stepped_parameters
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.testing.dry_run import DryRun, gradient_of
from ascend_run.testing.parameter_shards import ParameterShard

from .projections import projections


class StepGradients:
    """Records what the optimizer of a dry run gets, from the time of its creation."""

    def __init__(self, dry_run: DryRun) -> None:
        self.peaks: list[float] = []
        """For each shard, its largest clipped gradient; -1 if there never was one."""
        self.projections: list[list[list[float] | None]] = []
        """Step -> for each shard, the ``projections`` of its gradient before clipping; None if it
        has none."""
        self._dry_run = dry_run
        optimizer: Any = dry_run.bundle.optimizer
        self._inner = optimizer.step
        optimizer.step = self._step

    def _step(self) -> Any:
        with _disable_current_modes():  # else these operations would count as the step's own
            sizes = [_size(shard.tensor) for shard in self._dry_run.shards(gradient_of)]
            self.projections.append(self._projected())
        updated, norm, more = self._inner()
        most = self._dry_run.context.config.optimizer.clip_grad
        clipped = min(1.0, most / (norm + 1e-6)) if most > 0 and norm is not None else 1.0
        sizes = [size * clipped if size > 0 else size for size in sizes]
        self.peaks = [max(a, b) for a, b in zip(self.peaks or sizes, sizes, strict=True)]
        return updated, norm, more

    def _projected(self) -> list[list[float] | None]:
        ranges = _reduced_ranges(self._dry_run.bundle.optimizer)

        def read(parameter: Tensor) -> Tensor | None:
            gradient = gradient_of(parameter)
            if gradient is None or ranges is None:
                return gradient
            start, end = ranges.get(id(parameter), (0, 0))
            held = torch.full_like(gradient, torch.nan)
            held.view(-1)[start:end] = gradient.reshape(-1)[start:end]
            return held

        return [*map(_projections_of, self._dry_run.shards(read))]


def _reduced_ranges(optimizer: Any) -> dict[int, tuple[int, int]] | None:
    """Return id of a parameter -> range of its flat gradient that is reduced on this rank; None if
    every rank has full gradients."""
    if not is_distributed(optimizer):
        return None
    try:
        steps = [*stepped_parameters(optimizer)]
    except CheckpointError:
        return {}
    return {id(s.parameter): s.flat_range or (0, s.parameter.numel()) for s in steps}


def _projections_of(shard: ParameterShard) -> list[float] | None:
    if shard.tensor is None:
        return None
    return projections(shard.tensor, shard.offset, shard.global_shape)


def _size(gradient: Tensor | None) -> float:
    if gradient is None:
        return -1.0
    return float(gradient.abs().max()) if gradient.numel() else 0.0
