"""Faults of conversations, planted on the ranks: each returns what undoes it."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from tests.tools.verify.faults import Undo, replace


def train_prompts_on_the_second_rank() -> Undo:
    from ascend_run.plugins.tasks.sft.task import SftTask

    def change(inner: Any) -> Any:
        def forward_step(self: Any, context: Any, model: Any, batch: Any) -> Any:
            if dist.get_rank() == 1:
                every = torch.ones_like(batch.tensors["loss_mask"])
                batch = attrs.evolve(batch, tensors={**batch.tensors, "loss_mask": every})
            return inner(self, context, model, batch)

        return forward_step

    return replace(SftTask, "forward_step", change)


def count_every_token_on_the_second_rank() -> Undo:
    from ascend_run.plugins.tasks.sft.task import SftTask

    def change(inner: Any) -> Any:
        def forward_step(self: Any, context: Any, model: Any, batch: Any) -> Any:
            found = inner(self, context, model, batch)
            if isinstance(found, torch.Tensor) or dist.get_rank() != 1:
                return found
            return attrs.evolve(found, count=torch.tensor(batch.tensors["tokens"].numel()))

        return forward_step

    return replace(SftTask, "forward_step", change)
