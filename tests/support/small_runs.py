"""One rank of a tiny run: its hooks, groups and models; no folder, data files or launcher."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.testing.gloo_on_device import gloo_on_device, local_rank
from ascend_run.testing.models import samples
from ascend_run.testing.runtime import RankOutcome, Shard

Values = Mapping[str, Any]


def prepare(values: Values, enable: Sequence[str] = (), world_size: int = 1) -> PreparedRun:
    """Prepare a run from config keys (``model.num_layers``), as an entry point does."""
    given = {"data.train": ["none"], **values, "enable": [*enable]}
    raw = RawConfig(values={key: RawValue(value, "the test") for key, value in given.items()})
    return prepare_raw(raw, world_size=world_size)


@contextmanager
def rank_environment() -> Iterator[int]:
    """Set the launcher's variables for the existing process group; yields its size."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank(rank)), WORLD_SIZE=str(size))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's own deprecations
            yield size
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def standing_rank(
    values: Values, enable: Sequence[str] = (), *more: Any
) -> Iterator[tuple[Hooks, c.RunContext]]:
    """Make this process a rank of a run, seeded, without models.

    Args:
        more: Instances of plugins that are not installed, outermost.
    """
    from ascend_run.core.run import prepared_rank
    from ascend_run.core.train.seeding import seed_everything

    with rank_environment() as size:
        prepared = prepare(values, enable, size)
        with (
            prepared_rank(prepared.run_request(*more)) as (hooks, context),
            gloo_on_device(context.device.torch_device.type),
        ):
            seed_everything(context.config, context.layout)
            yield hooks, context


@contextmanager
def standing_model(
    values: Values, dtype: torch.dtype = torch.float64, enable: Sequence[str] = (), *more: Any
) -> Iterator[nn.Module]:
    """Build a bare model of one rank, with Megatron's process groups.

    Args:
        more: Instances of plugins that are not installed, outermost.
    """
    from ascend_run.core.model.build import build_model

    with standing_rank(values, enable, *more) as (hooks, context):
        bundle = build_model(context.config, hooks, context.groups, context.device, dtype=dtype)
        (model,) = bundle.chunks
        yield model


def initial_weights(values: Values) -> RankOutcome:
    """Return this rank's shards of an untrained model. A job for the pool."""
    from ascend_run.core.checkpoint.regions import model_shards, sharded_tensors
    from ascend_run.core.model.build import build_model

    with standing_rank(values) as (hooks, context):
        bundle = build_model(context.config, hooks, context.groups, context.device)
        tensors = sharded_tensors(bundle.chunks, vocab_size=values["model.vocab_size"])
        return outcome_of(model_shards(tensors, prefix="model"))


def outcome_of(shards: Sequence[c.TensorShard]) -> RankOutcome:
    """Return what ``testing.tensors.full_tensors`` reassembles, from the shards of a checkpoint."""
    return RankOutcome(
        losses=(),
        grad_norms=(),
        shards=tuple(
            Shard(
                name=shard.key,
                tensor=shard.tensor.detach().clone(),
                offset=shard.offset,
                global_shape=shard.global_shape,
            )
            for shard in shards
        ),
    )


class Training:
    """A model, its optimizer and the batches of ``testing.models.samples``, step by step."""

    def __init__(self, values: Values, hooks: Hooks, context: c.RunContext) -> None:
        from ascend_run.testing.dry_run import DryRun

        self.values, self.hooks, self.context = values, hooks, context
        self.dry_run = DryRun(hooks, context)
        self.dry_run.build()
        self.task, self.plan = self.dry_run.task, self.dry_run.plan
        self.role, self.bundle = self.dry_run.role, self.dry_run.bundle
        self.train_step = self.dry_run.train_step()

    def batches(self) -> Iterator[c.Batch]:
        """Return the one global batch, from its start."""
        count = self.context.config.train.global_batch_size
        return self.dry_run.batches(samples(self.values, count), first=0)

    def step(self) -> Any:
        """Take one optimizer step on the one global batch; returns its StepResult."""
        return self.train_step(self.batches(), self.plan.num_microbatches)

    def step_with_events(self) -> Any:
        """Take one optimizer step on the one global batch, with the events of a training step."""
        return self.dry_run.step(self.train_step, self.batches())

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the detached parameters, by their names in the model."""
        (chunk,) = self.bundle.chunks
        return {name: p.detach() for name, p in chunk.module.named_parameters()}


@contextmanager
def training(values: Values, enable: Sequence[str] = (), *more: Any) -> Iterator[Training]:
    """Build a model for training on the current ranks."""
    with standing_rank(values, enable, *more) as (hooks, context):
        yield Training(values, hooks, context)
