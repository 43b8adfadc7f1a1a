"""Assemble the recorded shards of a run to full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ascend_run.testing import tensors
from ascend_run.testing.runtime import Shard
from ascend_run.tools.verify.capture.record import Record

Read = Callable[[Record], Sequence[Tensor | None]]
"""Selects one tensor for each of a record's shards."""


def assemble(records: Sequence[Record], read: Read, *, trained: bool = True) -> tensors.FullTensors:
    """Assemble full tensors from the shards of all ranks.

    Args:
        trained: Only parameters that should train.
    """
    return tensors.assemble(_shards(record, read, trained) for record in records)


def _shards(record: Record, read: Read, trained: bool) -> Iterator[Shard]:
    for place, value in zip(record.places, read(record), strict=True):
        if place.is_trained or not trained:
            yield Shard(
                name=place.name,
                tensor=value,
                offset=place.offset,
                global_shape=place.global_shape,
            )


def factor(result: Tensor, expected: Tensor) -> float | None:
    """Return the scalar that ``expected`` is multiplied by in ``result``; None if there is none."""
    norm = float((expected * expected).sum())
    if result.shape != expected.shape or norm == 0.0:
        return None
    times = float((result * expected).sum()) / norm
    return times if tensors.relative_error(result, times * expected) < 1e-6 else None


def owner(parameter: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    module = parameter.rpartition(".")[0]
    # The experts' linears are separate modules, but computed as one.
    head, experts, _ = module.partition(".experts.")
    return f"{head}.experts" if experts else module
