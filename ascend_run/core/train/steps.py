"""One training step of a run: a step of each model that trains, on the same micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c

from .data_parallel import gather_parameters
from .step import StepResult, TrainStep


class TrainSteps(TrainStep):
    """The step of the first role, followed by those of the other roles that train."""

    def __init__(self, context: c.RunContext, task: c.Task, hooks: Hooks) -> None:
        first, *others = [role.name for role in task.roles if role.frozen_step is None]
        super().__init__(context, task, hooks, first)
        self.others = {name: TrainStep(context, task, hooks, name) for name in others}
        self.forward_backward.keeps = bool(others)

    def __call__(self, batches: Iterator[c.Batch], num_microbatches: int) -> StepResult:
        result = super().__call__(batches, num_microbatches)
        kept = self.forward_backward.kept
        others = {name: one(iter(kept), num_microbatches) for name, one in self.others.items()}
        return attrs.evolve(result, others=others)

    def gather(self) -> None:
        """Gather the updated weights, where their shards are gathered in the next forward."""
        for step in (self, *self.others.values()):
            gather_parameters(step.bundle)
