"""A dry run on one rank: builds and steps models with the same code as training.

Used by the conformance kit's trials and by ``verify``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_run.core.data.batches import BatchPlan
from ascend_run.core.hooks import Hooks
from ascend_run.core.hugging_face.models import load_model
from ascend_run.core.train.batches import BatchReader
from ascend_run.core.train.frozen_pass import FrozenPass
from ascend_run.core.train.models import build_models
from ascend_run.core.train.step import (
    ForwardBackward,
    StepEvents,
    StepResult,
    TrainStep,
    connect_schedule,
)
from ascend_run.core.train.steps import TrainSteps
from ascend_run.core.train.totals import LossTotals
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.parameter_shards import ParameterShard, parameter_shards

from .models import samples as kit_samples
from .other_weights import set_other_weights
from .probe_offsets import put_at_offsets
from .probe_weights import set_probe_weights

if TYPE_CHECKING:
    from ascend_run.types.data import Samples


class DryRun:
    """A run's models, built to compute gradients or to train; ``bundle`` is the first role's.

    Frozen models without a folder of their own get other weights than the trained one, as
    ``set_other_weights`` does.

    Args:
        probe_weights: Change weights of models with experts as ``set_probe_weights`` does.
        offsets: Let modules save inputs at an offset of their storage, as ``put_at_offsets`` does.
    """

    def __init__(
        self,
        hooks: Hooks,
        context: c.RunContext,
        *,
        probe_weights: bool = False,
        offsets: bool = False,
    ) -> None:
        self.hooks, self.context, self._probe_weights = hooks, context, probe_weights
        self._offsets, self.num_offsets = offsets, 0
        self.plan = BatchPlan.of_rank(context.config, context.layout)
        self.task: c.Task = hooks.require("ascend_task", config=context.config)
        self.role = self.task.roles[0].name

    @property
    def bundle(self) -> c.ModelBundle:
        return self.context.models[self.role]

    def for_gradients(self, dtype: torch.dtype) -> ForwardBackward:
        """Build the models without an optimizer, in any dtype; gradients are all-reduced, so that
        every rank has full ones."""
        self.build(dtype, with_optimizer=False)
        connect_schedule(self.bundle)
        return ForwardBackward(
            self.context, self.task, self.hooks, self.role, force_all_reduce=True
        )

    def build(self, dtype: torch.dtype | None = None, *, with_optimizer: bool = True) -> None:
        """Build the models; by default as in training, in the run's precision."""
        build_models(
            self.task,
            self.hooks,
            self.context,
            self.plan.num_microbatches,
            dtype=dtype,
            with_optimizer=with_optimizer,
        )
        if self._offsets:
            for bundle in self.context.models.values():
                put_at_offsets(bundle.chunks, self._count_offset)
        model = self.context.config.model
        for bundle in self.context.models.values():
            self._differ(bundle)
        assert isinstance(self.context.frozen_pass, FrozenPass)
        fill = partial(self._fill, self.context.frozen_pass.build)
        self.context.frozen_pass = FrozenPass(self.hooks, fill, repeatable=False)
        if self._probe_weights and model.num_moe_experts and model.hf_path is None:
            for bundle in self.context.models.values():
                set_probe_weights(bundle.chunks, model.vocab_size)
                if bundle.optimizer is not None:
                    bundle.optimizer.reload_model_params()

    def _count_offset(self) -> None:
        self.num_offsets += 1

    def load_weights(self) -> None:
        """Load the weights of the built models that have a folder of them."""
        family = self.hooks.require("ascend_model_family")
        loaded = {
            role: one
            for role, one in self.context.models.items()
            if one.weights is not None and one.chunks
        }
        for bundle in loaded.values():
            assert bundle.weights is not None
            load_model(bundle.weights, family, bundle.config, bundle)
            if bundle.optimizer is not None:
                bundle.optimizer.reload_model_params()
        for role in self.task.roles:
            if role.weights is None and role.name in loaded:
                self._differ(loaded[role.name])

    def _fill(
        self,
        fill: Callable[[c.RunContext, c.ModelBundle], None],
        context: c.RunContext,
        bundle: c.ModelBundle,
    ) -> None:
        fill(context, bundle)
        if next(role for role in self.task.roles if role.name == bundle.role).weights is None:
            self._differ(bundle)

    def _differ(self, bundle: c.ModelBundle) -> None:
        """Give a frozen model other weights."""
        if bundle.frozen:
            set_other_weights(bundle, bundle.config.model.vocab_size)

    def train_step(self) -> TrainSteps:
        """Return the train step; the models must have been built with their optimizers."""
        return TrainSteps(self.context, self.task, self.hooks)

    def samples(self, count: int) -> Samples | None:
        """Return so many samples: the kit's, which ``[data]`` does not name, or the task's own if
        its batches have other fields."""
        config = self.context.config
        keys = {
            "model.vocab_size": config.model.vocab_size,
            "data.seq_length": config.data.seq_length,
        }
        made = kit_samples(keys, count)
        if self.task.batch_fields.keys() <= made[0].keys():
            return made
        return self.task_samples(count)

    def task_samples(self, count: int) -> Samples | None:
        """Return the task's own data, of so many samples; None for a run without steps."""
        from ascend_run.core.data.samples import build_datasets
        from ascend_run.core.log.setup import configure_logging

        # What a run says of its data is no output of a dry run.
        with configure_logging(None, self.context.layout.rank, level="warning"):
            datasets = self.task.datasets(self.context, count, 0)
            return build_datasets(self.context.config, datasets, count, 0).train

    def batches(self, dataset: Samples, first: int | None = None) -> Iterator[c.Batch]:
        """Yield this rank's micro-batches of a dataset.

        Args:
            first: The first sample; None: the first one that is not consumed.
        """
        read = BatchReader(self.hooks, self.context, self.task.batch_fields, self.plan)
        return read(dataset, self.context.consumed_samples if first is None else first, "dry run's")

    def gradients(
        self,
        forward_backward: ForwardBackward,
        batches: Iterator[c.Batch],
        watched: AbstractContextManager[Any] | None = None,
    ) -> LossTotals:
        """Run forward and backward of one global batch.

        Args:
            watched: Context manager entered around forward and backward.

        Returns:
            Loss and metrics over all ranks.
        """
        self.hooks.event("ascend_before_step")(context=self.context)
        with watched or nullcontext():
            return forward_backward(batches, self.plan.num_microbatches)

    def step(
        self,
        train_step: TrainStep,
        batches: Iterator[c.Batch],
        watched: AbstractContextManager[Any] | None = None,
    ) -> StepResult:
        """Run one training step, with the events around it.

        Args:
            watched: As in ``gradients``.
        """
        with StepEvents(self.hooks, self.context), watched or nullcontext():
            return train_step(batches, self.plan.num_microbatches)

    def expert_biases(self) -> dict[str, Tensor]:
        """Return each router's bias of the choice, which is no parameter, by name."""
        vocab_size = self.context.config.model.vocab_size
        found = parameter_shards(self.bundle.chunks, vocab_size, Tensor.detach)
        return {
            shard.name: shard.tensor
            for shard in found
            if shard.name.endswith(".expert_bias") and shard.tensor is not None
        }

    def shards(self, read: Callable[[Tensor], Tensor | None]) -> list[ParameterShard]:
        """Return what ``read`` returns for each parameter, as shards of full tensors."""
        vocab_size = self.context.config.model.vocab_size
        found = parameter_shards(self.bundle.chunks, vocab_size, read)
        return [shard for shard in found if shard.is_parameter]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient: Megatron's ``main_grad``, or autograd's ``grad``."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
