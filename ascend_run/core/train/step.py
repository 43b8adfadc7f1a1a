"""One optimizer step: every micro-batch forward and backward, one reduction, one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c


@attrs.frozen
class StepResult:
    """What a step reports."""

    loss: float
    """Mean over every token (or sample) of the global batch."""
    grad_norm: float | None
    """Before clipping; None where the step was skipped."""
    skipped: bool
    """The gradients held inf or nan (fp16), so the weights did not move."""
    num_tokens: int
    learning_rate: float
    """Of this step's update, before the schedule moves on."""


class ForwardBackward:
    """Forward (and backward) over the micro-batches of one global batch, by Megatron's schedule."""

    def __init__(self, context: c.RunContext, task: c.Task, hooks: Hooks, role: str) -> None:
        self.context, self.task = context, task
        self.bundle = context.models[role]
        self.groups = context.groups
        self.schedule = hooks.wrap(
            "ascend_schedule", get_forward_backward_func(), config=context.config
        )

    def __call__(
        self, batches: Iterator[c.Batch], num_microbatches: int, *, forward_only: bool = False
    ) -> tuple[float, int]:
        """Run the micro-batches; (mean loss, tokens) over all ranks.

        After it each gradient is that of the mean loss over the global batch.
        """
        config = self.context.config
        reports = self.schedule(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.bundle.chunks,
            num_microbatches=num_microbatches,
            seq_length=config.data.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            forward_only=forward_only,
            pg_collection=self.groups,
        )
        total = torch.stack(reports).sum(dim=0)
        dist.all_reduce(total, group=self.groups.dp_cp)
        loss_sum, count = total.tolist()
        return loss_sum / max(count, 1.0), int(count)

    def _forward_step(
        self, batches: Iterator[c.Batch], model: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        loss = self.task.forward_step(self.context, model, next(batches))
        if not isinstance(loss, c.LossSum):
            return loss, None
        report = torch.stack((loss.sum.detach().double(), loss.count.double()))
        return loss.sum, lambda total: (total, loss.count.to(torch.int), report)


class TrainStep:
    """ForwardBackward and the update of one model."""

    def __init__(self, context: c.RunContext, task: c.Task, hooks: Hooks, role: str) -> None:
        self.bundle = context.models[role]
        self.forward_backward = ForwardBackward(context, task, hooks, role)
        self._connect(self.bundle)

    @staticmethod
    def _connect(bundle: c.ModelBundle) -> None:
        """What Megatron's schedules ask of the TransformerConfig."""
        config = bundle.transformer_config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = bundle.optimizer.scale_loss
        config.no_sync_func = bundle.chunks[0].no_sync
        # Megatron keeps the last run's for the process, in whatever shape that was.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def __call__(self, batches: Iterator[c.Batch], num_microbatches: int) -> StepResult:
        for chunk in self.bundle.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.bundle.optimizer.zero_grad()
        loss, num_tokens = self.forward_backward(batches, num_microbatches)
        learning_rate = float(self.bundle.optimizer.param_groups[0]["lr"])
        updated, grad_norm, _ = self.bundle.optimizer.step()
        if updated:
            self.bundle.scheduler.step(increment=1)
        return StepResult(
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=not updated,
            num_tokens=num_tokens,
            learning_rate=learning_rate,
        )

    @property
    def loss_scale(self) -> float:
        return float(self.bundle.optimizer.get_loss_scale())


@torch.no_grad()
def evaluate(
    forward_backward: ForwardBackward, batches: Iterator[c.Batch], num_batches: int, per_batch: int
) -> float:
    """Mean held-out loss over ``num_batches`` global batches of ``per_batch`` micro-batches."""
    chunks = forward_backward.bundle.chunks
    for chunk in chunks:
        chunk.eval()
    loss_sum, tokens = 0.0, 0
    for _ in range(num_batches):
        loss, count = forward_backward(batches, per_batch, forward_only=True)
        loss_sum, tokens = loss_sum + loss * count, tokens + count
    for chunk in chunks:
        chunk.train()
    return loss_sum / max(tokens, 1)
