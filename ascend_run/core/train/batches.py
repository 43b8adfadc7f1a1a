"""What a run reads: its datasets' micro-batches, wrapped by plugins and cut to this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ascend_run.core.data.batches import (
    BatchPlan,
    cut_sequence,
    join_rows,
    micro_batches,
    require_mask,
    require_samples,
    to_device,
)
from ascend_run.core.data.samples import end_of_document
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import DataError


class BatchReader:
    """From a dataset to this rank's micro-batches; plugins are asked once, here."""

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
        self._cut = sequence_cutter(hooks, context)

    def require(self, dataset: Any, consumed_samples: int, steps: int, name: str) -> None:
        """See that a dataset lasts for so many steps.

        Raises:
            DataError: It ends before.
        """
        require_samples(dataset, self._plan, consumed_samples, steps, f"the {name} dataset")

    def __call__(
        self,
        dataset: Any,
        consumed_samples: int,
        name: str,
        watch: Callable[[Iterator[c.Batch]], Iterator[c.Batch]] = lambda batches: batches,
    ) -> Iterator[c.Batch]:
        """This rank's micro-batches on its device; to ask for one too many is a DataError.

        Args:
            watch: Around the micro-batches while they are whole and on the host.
        """
        source = micro_batches(dataset, self._fields, self._plan, consumed_samples)
        count = 0
        for batch in self._cut(watch(self._wrap(source))):
            count += 1
            yield batch
        # Bare, the end of the iterator would come out of Megatron's schedule as a StopIteration.
        raise DataError(
            f"the {name} dataset of {len(dataset)} samples gave {count} micro-batches to this rank "
            "and no more, which is too few; a plugin that joins or drops samples needs more of them"
        )


def sequence_cutter(
    hooks: Hooks, context: c.RunContext
) -> Callable[[Iterator[c.Batch]], Iterator[c.Batch]]:
    """What joins rows that have documents of their own, and takes this rank's part of every
    micro-batch's sequence, to its device."""
    partition = hooks.provide("ascend_sequence_partition", config=context.config)
    cp_rank, cp_size = context.layout.coordinate("cp"), context.layout.cp

    def cut(batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
        for batch in map(join_rows, map(require_mask, batches)):
            if partition is not None:
                batch = cut_sequence(batch, partition, cp_rank, cp_size)
            yield to_device(batch, context.device.torch_device)

    return cut
