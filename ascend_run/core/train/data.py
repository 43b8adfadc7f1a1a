"""Open a run's datasets and read this rank's batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs

from ascend_run.core.data.batches import BatchPlan, require_samples
from ascend_run.core.data.samples import build_datasets
from ascend_run.core.fingerprint.reading import RowHashes
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c

from .batches import BatchReader


@attrs.frozen
class RunBatches:
    """This rank's micro-batches of a run."""

    train: Iterator[c.Batch]
    """From the consumed samples on; empty if no steps are left."""
    validation: Callable[[], Iterator[c.Batch]] | None
    """Returns a new iterator for each evaluation, always from the same first sample; None without
    evaluation."""


def open_batches(
    task: c.Task, hooks: Hooks, context: c.RunContext, plan: BatchPlan, rows: RowHashes
) -> RunBatches:
    """Build the datasets, check that they have enough samples, and start reading.

    Args:
        rows: Hashes the rows of the training batches for the run's fingerprints.

    Raises:
        DataError: A dataset cannot be read, or has too few samples.
    """
    train = context.config.train
    steps_left = max(0, train.train_iters - context.step)
    # train_iters * global_batch_size would be wrong if the run resumes with another batch size.
    train_samples = context.consumed_samples + steps_left * train.global_batch_size
    valid_samples = train.eval_iters * train.global_batch_size
    given = task.datasets(context, train_samples, valid_samples)
    datasets = build_datasets(context.config, given, train_samples, valid_samples)
    read = BatchReader(hooks, context, task.batch_fields, plan)
    validation = None
    if datasets.validation is not None and train.eval_interval:
        require_samples(datasets.validation, plan, 0, train.eval_iters, "the validation dataset")
        validation = partial(read, datasets.validation, 0, "validation")
    if datasets.train is None:
        return RunBatches(iter(()), validation)
    first = context.consumed_samples
    require_samples(datasets.train, plan, first, steps_left, "the training dataset")
    return RunBatches(read(datasets.train, first, "training", rows.watch), validation)
