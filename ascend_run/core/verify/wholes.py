"""A run's readings as whole tensors, and what one of them is times another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ascend_run.plugin_api.testing import tensors
from ascend_run.plugin_api.testing.runtime import Piece

from .record import Record

Read = Callable[[Record], Sequence[Tensor | None]]
"""One value for each of a record's places."""


def assemble(records: Sequence[Record], read: Read, *, trained: bool = True) -> tensors.Whole:
    """Put every rank's pieces into their places.

    Args:
        trained: Only parameters that should train.
    """
    return tensors.assemble(_pieces(record, read, trained) for record in records)


def _pieces(record: Record, read: Read, trained: bool) -> Iterator[Piece]:
    for place, value in zip(record.places, read(record), strict=True):
        if place.is_trained or not trained:
            yield Piece(
                name=place.name,
                tensor=value,
                offset=place.offset,
                global_shape=place.global_shape,
            )


def factor(result: Tensor, expected: Tensor) -> float | None:
    """The number that ``result`` is ``expected`` times, if it is."""
    norm = float((expected * expected).sum())
    if result.shape != expected.shape or norm == 0.0:
        return None
    times = float((result * expected).sum()) / norm
    return times if tensors.distance(result, times * expected) < 1e-6 else None


def owner(parameter: str) -> str:
    """The module that a parameter belongs to."""
    module = parameter.rpartition(".")[0]
    # Linears of experts are listed one by one, and computed in one.
    head, experts, _ = module.partition(".experts.")
    return f"{head}.experts" if experts else module
