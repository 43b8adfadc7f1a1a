"""Batches of this rank: micro-batches wrapped by plugins, sharded along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ascend_run.core.data.batches import (
    BatchPlan,
    join_rows,
    micro_batches,
    require_mask,
    shard_sequence,
    to_device,
)
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import DataError
from ascend_run.text.end_of_document import end_of_document

if TYPE_CHECKING:
    from ascend_run.types.data import Samples


class BatchReader:
    """Iterate over this rank's micro-batches of a dataset.

    Hooks are called once, in the constructor.
    """

    def __init__(
        self,
        hooks: Hooks,
        context: c.RunContext,
        fields: Mapping[str, c.BatchField],
        plan: BatchPlan,
    ) -> None:
        self._fields, self._plan = fields, plan
        self._wrap: Callable[[Iterator[c.Batch]], Iterator[c.Batch]] = hooks.composed(
            "ascend_batch",
            config=context.config,
            end_of_document=partial(end_of_document, context.config, context.config.data.train),
        )
        self._shard = sequence_sharder(hooks, context)

    def __call__(
        self,
        dataset: Samples,
        consumed_samples: int,
        name: str,
        watch: Callable[[Iterator[c.Batch]], Iterator[c.Batch]] = lambda batches: batches,
    ) -> Iterator[c.Batch]:
        """Yield this rank's micro-batches on its device.

        Args:
            watch: Wraps the iterator of micro-batches before sharding, while they are on the host.

        Raises:
            DataError: More micro-batches were requested than the dataset has.
        """
        source = micro_batches(dataset, self._fields, self._plan, consumed_samples)
        count = 0
        for batch in self._shard(watch(self._wrap(source))):
            count += 1
            yield batch
        # A bare return would surface from Megatron's schedule as a StopIteration.
        raise DataError(
            f"the {name} dataset of {len(dataset)} samples gave {count} micro-batches to this rank"
            ", which is too few; a plugin that joins or drops samples needs more of them"
        )


def sequence_sharder(
    hooks: Hooks, context: c.RunContext
) -> Callable[[Iterator[c.Batch]], Iterator[c.Batch]]:
    """Return a function that prepares micro-batches for this rank.

    It concatenates packed rows, takes this rank's shard of the sequence and copies it to the
    device.
    """
    partition = hooks.provide("ascend_sequence_partition", config=context.config)
    cp_rank, cp_size = context.layout.coordinate("cp"), context.layout.cp

    def shard(batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
        for batch in map(join_rows, map(require_mask, batches)):
            if partition is not None:
                batch = shard_sequence(batch, partition, cp_rank, cp_size)
            yield to_device(batch, context.device.torch_device)

    return shard
