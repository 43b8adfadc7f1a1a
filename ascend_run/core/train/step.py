"""One optimizer step: forward and backward of all micro-batches, gradient reduction, update."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import get_pp_last_rank
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from ascend_run.core.data.batches import BATCH_AXIS, SEQUENCE_AXIS, rows_and_length
from ascend_run.core.hooks import Hooks
from ascend_run.core.model.router import Router
from ascend_run.plugin_api import contracts as c

from .frozen import FrozenForward
from .phases import ScheduleTimers, phase_scope
from .retries import Retries
from .totals import LossTotals, report_of, report_size

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer


@attrs.frozen
class StepResult:
    """Result of one training step."""

    totals: LossTotals
    """Loss and metrics of the global batch."""
    grad_norm: float | None
    """Before clipping; None if the step was skipped."""
    skipped: bool
    """True if the gradients held inf or nan (fp16) and the weights were not updated."""
    learning_rate: float
    """The rate used by this step's update."""
    others: Mapping[str, StepResult] = attrs.field(factory=dict)
    """Role -> result, of the other models that train."""

    @property
    def loss(self) -> float:
        """Mean over all tokens (or samples) of the global batch."""
        return self.totals.loss


def connect_schedule(bundle: c.ModelBundle) -> None:
    """Set the TransformerConfig fields that Megatron's pipeline schedules read."""
    config = bundle.transformer_config
    finalize = finalize_model_grads
    config.finalize_model_grads_func = (
        partial(_finalize_wide, finalize) if config.params_dtype is torch.float64 else finalize
    )
    config.grad_scale_func = None if bundle.optimizer is None else bundle.optimizer.scale_loss
    no_sync = [cast("DistributedDataParallel", chunk).no_sync for chunk in bundle.chunks]
    # The interleaved schedule takes one no_sync function per model chunk.
    config.no_sync_func = cast("Any", no_sync) if len(no_sync) > 1 else no_sync[0]
    # Megatron keeps this scale per process; reset what an earlier run may have left.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _finalize_wide(
    finalize: Callable[..., None], model: list[nn.Module], num_tokens: Tensor | None, **options: Any
) -> None:
    """Finalize float64 gradients: Megatron divides by an integer count in float32."""
    finalize(model, None if num_tokens is None else num_tokens.double(), **options)


class StepEvents:
    """Context manager around a training step: its two events, and the counters between them."""

    def __init__(self, hooks: Hooks, context: c.RunContext) -> None:
        self._before = hooks.event("ascend_before_step")
        self._after = hooks.event("ascend_after_step")
        self._context = context

    def __enter__(self) -> None:
        self._before(context=self._context)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._context.step += 1
            self._context.consumed_samples += self._context.config.train.global_batch_size
            self._after(context=self._context)


class ForwardBackward:
    """Run forward (and backward) over the micro-batches of one global batch.

    Uses Megatron's pipeline schedule, wrapped by ``ascend_schedule``.

    Args:
        role: Of the model that trains.
        force_all_reduce: All-reduce the gradients even if a distributed optimizer only needs its
            shard.

    Attributes:
        keeps: Whether ``kept`` holds the micro-batches, with the results of frozen models, after a
            call.
    """

    def __init__(
        self,
        context: c.RunContext,
        task: c.Task,
        hooks: Hooks,
        role: str,
        *,
        force_all_reduce: bool = False,
    ) -> None:
        self.context, self.task = context, task
        self.bundle = context.models[role]
        self.groups = context.groups
        self.p2p = (
            P2PCommunicator(self.groups.pp, self.bundle.transformer_config)
            if self.groups.pp.size() > 1
            else None
        )
        config, device = self.bundle.transformer_config, context.device.torch_device
        modules = itertools.chain(*(chunk.modules() for chunk in self.bundle.chunks))
        has_losses = config.moe_aux_loss_coeff or config.moe_z_loss_coeff
        self.routers = [m for m in modules if isinstance(m, Router) and has_losses]
        for router in self.routers:
            router.loss_scale = torch.ones((), dtype=torch.float64, device=device)
        own = next(one.forward_step for one in task.roles if one.name == role)
        self.forward_step = own or task.forward_step
        self.metrics: Sequence[str] = () if own else task.metrics
        frozen = [one for one in task.roles if one.frozen_step and not (own or one.ahead)]
        self.frozen = [FrozenForward(hooks, context, one, self.bundle) for one in frozen]
        self.keeps, self.kept = False, list[c.Batch]()
        self.force_all_reduce = force_all_reduce
        timers = ScheduleTimers(hooks, context) if hooks.implements("ascend_phase") else None
        self.bundle.transformer_config.timers, self.phases = timers, timers or nullcontext()
        self.schedule = hooks.wrap(
            "ascend_schedule", get_forward_backward_func(), config=context.config
        )

    def __call__(
        self, batches: Iterator[c.Batch], num_microbatches: int, *, forward_only: bool = False
    ) -> LossTotals:
        """Run the micro-batches and return loss and metrics over all ranks.

        Afterwards each gradient is that of the mean loss over the global batch.
        """
        # Every model chunk reads every micro-batch, each at its own pace.
        read = itertools.islice(batches, num_microbatches)
        seq_length, micro_batch_size, once = self._shape(read)
        for frozen in self.frozen:
            once = iter(frozen([*once], seq_length, micro_batch_size))
        if self.keeps:
            self.kept = [*once]
            once = iter(self.kept)
        if self.routers and torch.is_grad_enabled():
            once = iter(self._scale_router_losses([*once]))
        with self.phases:
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
        return LossTotals.from_tensor(self._total(reports), self.metrics)

    def _shape(self, batches: Iterator[c.Batch]) -> tuple[int, int, Iterator[c.Batch]]:
        """Return the shape of the activations sent between pipeline stages.

        Read it from the first micro-batch, since packing rows changes it from the configured one.

        Returns:
            Tuple of full sequence length, rows of a micro-batch, and an iterator over the same
            batches.
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

    def _scale_router_losses(self, batches: list[c.Batch]) -> list[c.Batch]:
        """Set the scale of the routers' losses in a step with these micro-batches."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.context.device.torch_device)
        for batch in batches:
            totals[0] += self.task.count(self.context, batch)
            totals[1] += math.prod(rows_and_length(batch))
        dist.all_reduce(totals, group=self.groups.dp_cp)
        for router in self.routers:
            router.loss_scale.copy_(totals[0] / totals[1])
        return batches

    def _total(self, reports: list[Tensor]) -> Tensor:
        """Sum reports over all ranks; only the last stage has any."""
        device, size = self.context.device.torch_device, report_size(self.metrics)
        total = torch.zeros(size, dtype=torch.float64, device=device)
        if reports:
            total += torch.stack(reports).sum(dim=0)
            dist.all_reduce(total, group=self.groups.dp_cp)
        if self.p2p is not None:
            dist.broadcast(total, get_pp_last_rank(self.groups.pp), group=self.groups.pp)
        return total

    def _forward_step(
        self, batches: Iterator[c.Batch], model: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        loss = self.forward_step(self.context, model, next(batches))
        if not isinstance(loss, c.LossSum):
            return loss, None
        report = report_of(loss, self.metrics)
        return loss.sum, lambda total: (total, loss.count.to(torch.int), report)


class TrainStep:
    """One training step of one model: :class:`ForwardBackward`, then the optimizer update."""

    def __init__(self, context: c.RunContext, task: c.Task, hooks: Hooks, role: str) -> None:
        self.bundle = context.models[role]
        self.forward_backward = ForwardBackward(context, task, hooks, role)
        self.update_scope = phase_scope(hooks, context, c.RunPhase.UPDATE)
        self.retries = Retries(hooks, context, self.bundle)
        connect_schedule(self.bundle)

    def __call__(self, batches: Iterator[c.Batch], num_microbatches: int) -> StepResult:
        optimizer, scheduler = self._optimizer, self.bundle.scheduler
        totals = self.retries(self._gradients, batches, num_microbatches)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        with self.update_scope():
            updated, grad_norm, _ = optimizer.step()
        if updated and scheduler is not None:
            scheduler.step(increment=1)
        return StepResult(
            totals=totals,
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=not updated,
            learning_rate=learning_rate,
        )

    def _gradients(self, batches: Iterator[c.Batch], num_microbatches: int) -> LossTotals:
        for chunk in self.bundle.chunks:
            chunk.train()
            cast("DistributedDataParallel", chunk).zero_grad_buffer()
        self._optimizer.zero_grad()
        return self.forward_backward(batches, num_microbatches)

    @property
    def loss_scale(self) -> float:
        return float(self._optimizer.get_loss_scale())

    @property
    def _optimizer(self) -> MegatronOptimizer:
        assert self.bundle.optimizer is not None, "a model that is not trained"
        return self.bundle.optimizer


@torch.no_grad()
def evaluate(
    forward_backward: ForwardBackward, batches: Iterator[c.Batch], num_batches: int, per_batch: int
) -> LossTotals:
    """Return loss and metrics of ``num_batches`` batches of ``per_batch`` micro-batches each."""
    chunks = forward_backward.bundle.chunks
    for chunk in chunks:
        chunk.eval()
    every = [forward_backward(batches, per_batch, forward_only=True) for _ in range(num_batches)]
    for chunk in chunks:
        chunk.train()
    return functools.reduce(operator.add, every)
