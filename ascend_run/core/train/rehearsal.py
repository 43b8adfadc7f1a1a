"""A run on one rank up to where the loop would begin: what checks a run does just what trains one.

The conformance kit's trials and ``verify`` stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ascend_run.core.checkpoint.parameter_pieces import ParameterPiece, parameter_pieces
from ascend_run.core.data.batches import BatchPlan
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c

from .batches import BatchReader
from .models import build_models
from .step import ForwardBackward, StepResult, TrainStep, connect_schedule


class Rehearsal:
    """A run's models, built for gradients alone or for training; the first role's is looked at."""

    def __init__(self, hooks: Hooks, context: c.RunContext) -> None:
        self.hooks, self.context = hooks, context
        self.plan = BatchPlan.of_rank(context.config, context.layout)
        self.task: c.Task = hooks.require("ascend_task", config=context.config)
        self.role = self.task.roles[0]

    @property
    def bundle(self) -> c.ModelBundle:
        return self.context.models[self.role]

    def for_gradients(self, dtype: torch.dtype) -> ForwardBackward:
        """The models in a dtype that their optimizer need not know; every rank is left with whole
        gradients."""
        self.build(dtype, with_optimizer=False)
        connect_schedule(self.bundle)
        forward_backward = ForwardBackward(self.context, self.task, self.hooks, self.role)
        forward_backward.force_all_reduce = True  # or a rank would hold a part of the gradient
        return forward_backward

    def build(self, dtype: torch.dtype | None = None, *, with_optimizer: bool = True) -> None:
        """The models; by default as training has them, in the run's own precision."""
        build_models(
            self.task,
            self.hooks,
            self.context,
            self.plan.num_micro_batches,
            dtype=dtype,
            with_optimizer=with_optimizer,
        )

    def train_step(self) -> TrainStep:
        """Of what was built with its optimizer."""
        return TrainStep(self.context, self.task, self.hooks, self.role)

    def batches(self, dataset: Any) -> Iterator[c.Batch]:
        """This rank's micro-batches of a dataset, from where the run stands."""
        read = BatchReader(self.hooks, self.context, self.task.batch_fields, self.plan)
        return read(dataset, self.context.consumed_samples, "rehearsal's")

    def gradients(
        self,
        forward_backward: ForwardBackward,
        batches: Iterator[c.Batch],
        watched: AbstractContextManager[Any] | None = None,
    ) -> tuple[float, int]:
        """One global batch without an update: its mean loss, and its tokens.

        Args:
            watched: Entered around forward and backward; so for ``step``.
        """
        self.hooks.event("ascend_before_step")(context=self.context)
        with watched or nullcontext():
            return forward_backward(batches, self.plan.num_micro_batches)

    def step(
        self,
        train_step: TrainStep,
        batches: Iterator[c.Batch],
        watched: AbstractContextManager[Any] | None = None,
    ) -> StepResult:
        """One step of training, and the events around it."""
        self.hooks.event("ascend_before_step")(context=self.context)
        with watched or nullcontext():
            result = train_step(batches, self.plan.num_micro_batches)
        self.context.step += 1
        self.context.consumed_samples += self.plan.global_batch_size
        self.hooks.event("ascend_after_step")(context=self.context)
        return result

    def pieces(self, read: Callable[[Tensor], Tensor | None]) -> list[ParameterPiece]:
        """What ``read`` answers for each parameter, as pieces of whole tensors."""
        vocab_size = self.context.config.model.vocab_size
        found = parameter_pieces(self.bundle.chunks, vocab_size, read)
        return [piece for piece in found if piece.is_parameter]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Where Megatron's data parallelism left it, or autograd."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
