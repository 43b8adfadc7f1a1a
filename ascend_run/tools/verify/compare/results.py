"""Whether two runs of one layout train the same parameters, and have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ascend_run.tools.verify.capture.record import Record

Read = Callable[[Record], "list[Tensor | None]"]
"""Selects tensors of a record; empty if they were not recorded."""


def changed_results(candidate: Sequence[Record], without: Sequence[Record]) -> Iterator[str]:
    """Yield the numbers of parameters that differ, and the results that differ in any bit."""
    mine, other = _trained(candidate), _trained(without)
    added = [name for name in mine.keys() - other.keys() if mine[name]]
    frozen = [name for name in other.keys() - mine.keys() if other[name]]
    still = [name for name in mine.keys() & other.keys() if mine[name] is not other[name]]
    for what, names in (
        ("parameters added that train", added),
        ("parameters removed", frozen),
        ("parameters frozen or unfrozen", still),
    ):
        if names:
            yield f"{what}: {len(names)}"
    differing = [
        name
        for name, read in _READINGS.items()
        if any(_differ(one, two, read) for one, two in zip(candidate, without, strict=True))
    ]
    if differing:
        yield f"results that differ: {', '.join(differing)}"


def _trained(records: Sequence[Record]) -> dict[str, bool]:
    """Parameter -> whether it ever had a gradient other than zero."""
    found: dict[str, bool] = {}
    for record in records:
        for index, place in enumerate(record.places):
            peak = record.peaks[index] if record.peaks else 0.0
            found[place.name] = found.get(place.name, False) or (place.trains and peak > 0.0)
    return found


def _gradients(record: Record) -> list[Tensor | None]:
    recorded = any(gradient is not None for gradient in record.gradients)
    return list(record.gradients) if recorded else []


def _weights(record: Record) -> list[Tensor | None]:
    return list(record.weights[-1]) if record.weights else []


def _losses(record: Record) -> list[Tensor | None]:
    return [torch.tensor([*record.losses, *record.grad_norms], dtype=torch.float64)]


_READINGS: Final[Mapping[str, Read]] = {
    "gradients": _gradients,
    "losses and norms": _losses,
    "weights": _weights,
}


def _differ(one: Record, other: Record, read: Read) -> bool:
    """Whether any bit differs of the tensors that both records have."""
    mine, theirs = read(one), read(other)
    if not mine or not theirs:
        return False
    if len(mine) == len(one.places) and len(theirs) == len(other.places):
        held = {(p.name, p.offset): x for p, x in zip(other.places, theirs, strict=True)}
        pairs = [
            (x, held[p.name, p.offset])
            for p, x in zip(one.places, mine, strict=True)
            if (p.name, p.offset) in held
        ]
    else:
        pairs = list(zip(mine, theirs, strict=False))
    return any(not _equal(x, y) for x, y in pairs)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())


def zero_gradients(records: Sequence[Record]) -> tuple[int, int]:
    """Return how many trained parameters never had a gradient other than zero, and their number."""
    names: Counter[str] = Counter()
    for record in records:
        for index, place in enumerate(record.places):
            if place.is_trained:
                names[place.name] += bool(record.peaks and record.peaks[index] > 0.0)
    return sum(count == 0 for count in names.values()), len(names)
