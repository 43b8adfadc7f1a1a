"""Faults of rated steps, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def count_every_position() -> Undo:
    """As where the labels of other positions, -100, are not left out of the count."""
    from ascend_run.plugins.tasks.prm.task import PrmTask

    def change(inner: Any) -> Any:
        def forward_step(self: Any, context: Any, model: Any, batch: Any) -> Any:
            import attrs

            found = inner(self, context, model, batch)
            if isinstance(found, torch.Tensor) or dist.get_world_size() == 1:
                return found
            return attrs.evolve(found, count=torch.tensor(batch.tensors["tokens"].numel()))

        return forward_step

    return replace(PrmTask, "forward_step", change)


def take_the_next_rating_on_the_second_rank() -> Undo:
    from ascend_run.plugins.tasks.prm import task

    def change(inner: Any) -> Any:
        def loss(values: Any, ratings: Any) -> Any:
            return inner(values, ratings if dist.get_rank() != 1 else 1 - ratings)

        return loss

    return replace(task, "rating_loss", change)
