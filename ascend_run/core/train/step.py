"""One optimizer step: every micro-batch forward and backward, one reduction, one update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from ascend_run.core.data.batches import BATCH_AXIS, SEQUENCE_AXIS
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


def connect_schedule(bundle: c.ModelBundle) -> None:
    """Give Megatron's schedules what they look for in the TransformerConfig."""
    config = bundle.transformer_config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = bundle.optimizer.scale_loss if bundle.trains else None
    no_sync = [chunk.no_sync for chunk in bundle.chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    if config.virtual_pipeline_model_parallel_size and config.pipeline_model_parallel_size == 2:
        # Each of two ranks is the other's next and previous one. A batch of messages tells them
        # apart by their order alone, and Megatron's is not the same on both sides.
        config.batch_p2p_comm = False
    # Megatron keeps the last run's for the process, in whatever shape that was.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


class ForwardBackward:
    """Forward (and backward) over the micro-batches of one global batch, by Megatron's schedule."""

    def __init__(self, context: c.RunContext, task: c.Task, hooks: Hooks, role: str) -> None:
        self.context, self.task = context, task
        self.bundle = context.models[role]
        self.groups = context.groups
        self.p2p = (
            P2PCommunicator(self.groups.pp, self.bundle.transformer_config)
            if self.groups.pp.size() > 1
            else None
        )
        self.force_all_reduce = False
        """Leave the whole gradient on every rank, where a distributed optimizer needs a part."""
        self.schedule = hooks.wrap(
            "ascend_schedule", get_forward_backward_func(), config=context.config
        )

    def __call__(
        self, batches: Iterator[c.Batch], num_microbatches: int, *, forward_only: bool = False
    ) -> tuple[float, int]:
        """Run the micro-batches; (mean loss, tokens) over all ranks.

        After it each gradient is that of the mean loss over the global batch.
        """
        # Every chunk reads every micro-batch, each at its own time.
        read = itertools.islice(batches, num_microbatches)
        seq_length, micro_batch_size, once = self._shape(read)
        reports = self.schedule(
            forward_step_func=self._forward_step,
            data_iterator=list(itertools.tee(once, len(self.bundle.chunks))),
            model=self.bundle.chunks,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            pg_collection=self.groups,
            p2p_communicator=self.p2p,
            force_all_reduce=self.force_all_reduce,
        )
        loss_sum, count = self._total(reports).tolist()
        return loss_sum / max(count, 1.0), int(count)

    def _shape(self, batches: Iterator[c.Batch]) -> tuple[int, int, Iterator[c.Batch]]:
        """What passes between pipeline stages has the shape of the micro-batches, which joined
        rows make another than the run's options say.

        Returns:
            Positions of a whole sequence, rows, and the same batches, of which one was looked at.
        """
        config = self.context.config
        length, rows = config.data.seq_length, config.train.micro_batch_size
        if self.p2p is None:
            return length, rows, batches
        first = next(batches)
        for name, tensor in first.tensors.items():
            field = first.fields[name]
            if {BATCH_AXIS, SEQUENCE_AXIS} <= {*field.axes} and not field.replicated:
                length = tensor.shape[field.axes.index(SEQUENCE_AXIS)] * self.groups.cp.size()
                rows = tensor.shape[field.axes.index(BATCH_AXIS)]
                break
        return length, rows, itertools.chain((first,), batches)

    def _total(self, reports: list[Tensor]) -> Tensor:
        """[2]: the loss and the tokens over all ranks; only the last pipeline stage has reports."""
        device = self.context.device.torch_device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        if reports:
            total += torch.stack(reports).sum(dim=0)
            dist.all_reduce(total, group=self.groups.dp_cp)
        if self.p2p is not None:
            dist.broadcast(total, get_pp_last_rank(self.groups.pp), group=self.groups.pp)
        return total

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
        connect_schedule(self.bundle)

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
