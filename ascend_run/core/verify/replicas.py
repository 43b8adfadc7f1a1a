"""Copies of one tensor on several ranks: within a pipeline stage, and tied over two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ascend_run.plugin_api.testing.tensors import Replica

from .record import Record
from .thresholds import FLOAT32_EPS, FLOAT64_EPS, GRADIENT
from .verdict import ITSELF, Check, Fault, Phase
from .wholes import assemble, owner

Kind = Callable[[Replica], bool]


def replicas(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """On ranks of a stage: gradients to rounding, weights in every bit."""
    return _copies("replicas over ranks", records, lambda r: not _crosses_stages(records, r))


def tied(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """The same over the first and the last pipeline stage, which hold one embedding."""
    return _copies("tied weights", records, lambda r: _crosses_stages(records, r))


def _crosses_stages(records: Sequence[Record], replica: Replica) -> bool:
    return records[replica.other].coordinates["pp"] != records[replica.rank].coordinates["pp"]


def _copies(name: str, records: Sequence[Record], kind: Kind) -> tuple[Check, Fault | None]:
    initial = [r for r in assemble(records, lambda x: x.initial, trained=False).replicas if kind(r)]
    gradients = [
        r
        for r in assemble(records, lambda x: x.gradients).replicas
        if r.apart > GRADIENT and kind(r)
    ]
    weights = _weights(records, kind)
    phase = Phase.FORWARD if initial else Phase.BACKWARD if gradients else Phase.OPTIMIZER
    found = [*initial, *gradients, *weights]
    if not found:
        return Check(name=name, against=ITSELF, passed=True), None
    details = [
        *(_told(r, "initial weights") for r in initial),
        *(_told(r, "gradients") for r in gradients),
        *(_told(r, "weights") for r in weights),
    ]
    worst = max(found, key=lambda r: r.apart)
    eps = FLOAT32_EPS if phase is Phase.OPTIMIZER else FLOAT64_EPS
    check = Check(
        name=name,
        against=ITSELF,
        passed=False,
        worst=worst.apart,
        eps=worst.apart / eps,
        where=worst.name,
        details=tuple(details[:20]),
    )
    suspects = [*dict.fromkeys(owner(r.name) for r in found)]
    names = {r.name for r in found}
    if phase is Phase.OPTIMIZER and len(names) > 1 and 2 * len(names) > _num_copied(records):
        # Most of them at once are no module's fault, but of what steps them all.
        suspects.insert(0, "optimizer")
    why = "ranks that hold one tensor do not agree on it"
    return check, Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:20]), why=why)


def _num_copied(records: Sequence[Record]) -> int:
    """Trained parameters of which several ranks hold the same part."""
    held = Counter(
        (place.name, place.offset)
        for record in records
        for place in record.places
        if place.is_trained
    )
    return len({name for (name, _), count in held.items() if count > 1})


def _weights(records: Sequence[Record], kind: Kind) -> list[Replica]:
    """After the first step after which any copies differ."""
    for step in range(len(records[0].weights)):
        found = assemble(records, lambda x, step=step: x.weights[step], trained=False).replicas
        if found:
            return [r for r in found if kind(r)]
    return []


def _told(replica: Replica, what: str) -> str:
    return (
        f"{what} of {replica.name} on ranks {replica.other} and {replica.rank} lie "
        f"{replica.apart:.2e} apart"
    )
