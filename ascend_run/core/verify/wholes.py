"""From the pieces that ranks hold to whole tensors, and how far two of them lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from .record import Place, Record


@attrs.frozen(kw_only=True)
class Replica:
    """Two ranks' copies of one place that are not equal."""

    name: str
    rank: int
    other: int
    apart: float
    crosses_stages: bool
    """The ranks are of different pipeline stages, so the tensor is a tied one."""


@attrs.frozen
class Wholes:
    """One reading of a run's parameters over all ranks."""

    tensors: Mapping[str, Tensor]
    replicas: tuple[Replica, ...]
    unheld: Mapping[str, int]
    """Name -> elements that no rank holds."""
    missing: tuple[tuple[int, str], ...]
    """(rank, name) of what has nothing to read."""


def assemble(
    records: Sequence[Record],
    read: Callable[[Record], Sequence[Tensor | None]],
    *,
    trained: bool = True,
) -> Wholes:
    """Put every rank's pieces into their places.

    Args:
        trained: Only parameters that need a gradient.
    """
    tensors: dict[str, Tensor] = {}
    holder: dict[str, Tensor] = {}
    replicas: dict[tuple[str, int, int], Replica] = {}
    missing: list[tuple[int, str]] = []
    for record in records:
        for place, value in zip(record.places, read(record), strict=True):
            if trained and not place.trains:
                continue
            if value is None:
                missing.append((record.rank, place.name))
                continue
            if place.name not in tensors:
                tensors[place.name] = torch.zeros(place.global_shape, dtype=value.dtype)
                holder[place.name] = torch.full(place.global_shape, -1, dtype=torch.int32)
            at = slices(place, value)
            held, known = holder[place.name][at], tensors[place.name][at]
            if bool((held >= 0).any()):
                both = held >= 0
                if not torch.equal(value[both], known[both]):
                    other = int(held[both][0])
                    replicas.setdefault(
                        (place.name, record.rank, other),
                        Replica(
                            name=place.name,
                            rank=record.rank,
                            other=other,
                            apart=distance(value[both], known[both]),
                            crosses_stages=records[other].coordinates["pp"]
                            != record.coordinates["pp"],
                        ),
                    )
            tensors[place.name][at] = value
            held.fill_(record.rank)
    unheld = {name: int((where < 0).sum()) for name, where in holder.items()}
    return Wholes(
        tensors,
        tuple(replicas.values()),
        {name: count for name, count in unheld.items() if count},
        tuple(missing),
    )


def slices(place: Place, value: Tensor) -> tuple[slice, ...]:
    """Where a piece lies in its whole."""
    return tuple(
        slice(start, start + length)
        for start, length in zip(place.offset, value.shape, strict=True)
    )


def distance(result: Tensor, expected: Tensor, quiet: float = 0.0) -> float:
    """max|a - b| / max|b|; 0 for equal bits, infinite where a number is none.

    Args:
        quiet: The least that is taken for max|b|.
    """
    if result.shape != expected.shape:
        return math.inf
    if torch.equal(result, expected):
        return 0.0
    scale = max(float(expected.abs().max()), quiet)
    apart = float((result - expected).abs().max())
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale > 0 else math.inf


def factor(result: Tensor, expected: Tensor) -> float | None:
    """The number that ``result`` is ``expected`` times, if it is."""
    norm = float((expected * expected).sum())
    if result.shape != expected.shape or norm == 0.0:
        return None
    times = float((result * expected).sum()) / norm
    return times if distance(result, times * expected) < 1e-6 else None
