"""A run on one rank up to where the loop would begin: what checks a run does just what trains one.

The conformance kit's trials and ``verify`` stand on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ascend_run.core.data.batches import BatchPlan
from ascend_run.core.hooks import Hooks
from ascend_run.core.model.build import build_model
from ascend_run.plugin_api import contracts as c

from .batches import BatchReader
from .data_parallel import wrap_data_parallel
from .optimizer import build_optimizer
from .step import ForwardBackward, TrainStep, connect_schedule


class Rehearsal:
    """The first role's model of a run, built for gradients alone or for training.

    Args:
        plan: How a global batch is dealt out to this rank.
    """

    def __init__(self, hooks: Hooks, context: c.RunContext, plan: BatchPlan) -> None:
        self.hooks, self.context, self.plan = hooks, context, plan
        self.task: c.Task = hooks.require("ascend_task", config=context.config)
        self.role = self.task.roles[0]

    @property
    def bundle(self) -> c.ModelBundle:
        return self.context.models[self.role]

    def for_gradients(self, dtype: torch.dtype) -> ForwardBackward:
        """The model in a dtype that its optimizer need not know; every rank is left with whole
        gradients."""
        self._build(dtype)
        connect_schedule(self.bundle)
        forward_backward = ForwardBackward(self.context, self.task, self.hooks, self.role)
        forward_backward.force_all_reduce = True  # or a rank would hold a part of the gradient
        return forward_backward

    def for_training(self) -> TrainStep:
        """The model and its optimizer, in the run's own precision."""
        self._build(None)
        build_optimizer(self.bundle, self.context.config, self.hooks, self.context.groups)
        return TrainStep(self.context, self.task, self.hooks, self.role)

    def batches(self, dataset: Any) -> Iterator[c.Batch]:
        """This rank's micro-batches of a dataset, from its first sample."""
        read = BatchReader(self.hooks, self.context, self.task.batch_fields, self.plan)
        return read(dataset, 0, "rehearsal's")

    def _build(self, dtype: torch.dtype | None) -> None:
        context = self.context
        bundle = build_model(
            context.config,
            self.hooks,
            context.groups,
            context.device,
            role=self.role,
            dtype=dtype,
        )
        context.models[self.role] = bundle
        wrap_data_parallel(
            bundle, context.config, self.hooks, context.groups, self.plan.num_micro_batches
        )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Where Megatron's data parallelism left it, or autograd."""
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
