"""What must hold inside one run, whatever it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from .comparison import owner
from .record import Record
from .thresholds import FLOAT32_EPS, FLOAT64_EPS, GRADIENT
from .verdict import Check, Fault, Phase
from .wholes import Replica, assemble

ITSELF: Final = "itself"
_OF_THE_PROCESS: Final = ("torch", "python", "numpy")


def invariants(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> tuple[list[Check], Fault | None]:
    """Every check of a run with itself, and where the first that failed points.

    Args:
        reference: A parameter that does not move there either is not held against this run.
    """
    found = [
        _replicas(records),
        _tied(records),
        _moved(records, reference),
        _frozen(records),
        _streams(records),
    ]
    faults = [fault for check, fault in found if fault is not None]
    return [check for check, _ in found], faults[0] if faults else None


def _replicas(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Copies of one place on ranks of a stage: gradients to rounding, weights in every bit."""
    gradients = [
        r
        for r in assemble(records, lambda record: record.gradients).replicas
        if r.apart > GRADIENT and not r.crosses_stages
    ]
    weights = [r for r in _weight_replicas(records) if not r.crosses_stages]
    initial = [r for r in _initial_replicas(records) if not r.crosses_stages]
    phase = Phase.FORWARD if initial else Phase.BACKWARD if gradients else Phase.OPTIMIZER
    details = [
        *(_told(r, "initial weights") for r in initial),
        *(_told(r, "gradients") for r in gradients),
        *(_told(r, "weights") for r in weights),
    ]
    return _verdict("replicas over ranks", [*initial, *gradients, *weights], details, phase)


def _tied(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """The same over the first and the last pipeline stage, which hold one embedding."""
    gradients = [
        r
        for r in assemble(records, lambda record: record.gradients).replicas
        if r.apart > GRADIENT and r.crosses_stages
    ]
    weights = [r for r in _weight_replicas(records) if r.crosses_stages]
    initial = [r for r in _initial_replicas(records) if r.crosses_stages]
    phase = Phase.FORWARD if initial else Phase.BACKWARD if gradients else Phase.OPTIMIZER
    details = [
        *(_told(r, "initial weights") for r in initial),
        *(_told(r, "gradients") for r in gradients),
        *(_told(r, "weights") for r in weights),
    ]
    return _verdict("tied weights", [*initial, *gradients, *weights], details, phase)


def _weight_replicas(records: Sequence[Record]) -> list[Replica]:
    for step in range(len(records[0].weights)):
        found = assemble(records, _step_reader(step), trained=False).replicas
        if found:
            return [*found]
    return []


def _initial_replicas(records: Sequence[Record]) -> list[Replica]:
    return [*assemble(records, lambda record: record.initial, trained=False).replicas]


def _step_reader(step: int) -> Callable[[Record], Sequence[Tensor | None]]:
    return lambda record: record.weights[step]


def _told(replica: Replica, what: str) -> str:
    return (
        f"{what} of {replica.name} on ranks {replica.other} and {replica.rank} lie "
        f"{replica.apart:.2e} apart"
    )


def _verdict(
    name: str, replicas: Sequence[Replica], details: Sequence[str], phase: Phase
) -> tuple[Check, Fault | None]:
    if not replicas:
        return Check(name=name, against=ITSELF, passed=True), None
    worst = max(replicas, key=lambda r: r.apart)
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
    suspects = [*dict.fromkeys(owner(r.name) for r in replicas)]
    why = "ranks that hold one tensor do not agree on it"
    return check, Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:20]), why=why)


def _moved(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> tuple[Check, Fault | None]:
    """Every parameter that trains had a gradient and is elsewhere after the steps."""
    moved, peaks = _motion(records)
    others = _motion(reference)[0] if reference is not None else {}
    still = [name for name, has in moved.items() if not has and others.get(name, True)]
    # Weight decay moves what has no gradient.
    quiet = [
        name
        for name, peak in peaks.items()
        if peak <= 0.0 and name not in still and _peak_of(reference, name) > 0.0
    ]
    details = [
        *(f"{name} trains, and did not move ({_said(peaks[name])})" for name in still),
        *(f"{name} trains, and {_said(peaks[name])}" for name in quiet),
    ]
    if not details:
        return Check(name="parameters that must move", against=ITSELF, passed=True), None
    wrong = [*still, *quiet]
    phase = Phase.OPTIMIZER if all(peaks[n] > 0.0 for n in wrong) else Phase.BACKWARD
    check = Check(
        name="parameters that must move",
        against=ITSELF,
        passed=False,
        where=wrong[0],
        details=tuple(details[:20]),
    )
    suspects = [*dict.fromkeys(map(owner, wrong))]
    why = "parameters do not train"
    return check, Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:20]), why=why)


def _peak_of(records: Sequence[Record] | None, name: str) -> float:
    """The largest gradient in a reference; 1 where it does not have the parameter."""
    if records is None:
        return 1.0
    return _motion(records)[1].get(name, 1.0)


def _said(peak: float) -> str:
    return "never had a gradient" if peak < 0 else f"its largest gradient was {peak:.1e}"


def _motion(records: Sequence[Record]) -> tuple[Mapping[str, bool], Mapping[str, float]]:
    """Trained parameter -> whether any part of it moved; and its largest gradient."""
    moved: dict[str, bool] = {}
    peaks: dict[str, float] = {}
    for record in records:
        if not record.weights:
            continue
        for index, place in enumerate(record.places):
            if not place.trains or not record.initial[index].numel():
                continue
            after = record.weights[-1][index]
            stays = torch.equal(record.initial[index].to(after.dtype), after)
            moved[place.name] = moved.get(place.name, False) or not stays
            peaks[place.name] = max(peaks.get(place.name, -1.0), record.peaks[index])
    return moved, peaks


def _frozen(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """What does not train is where it was."""
    wrong = [
        place.name
        for record in records
        for index, place in enumerate(record.places)
        if not place.trains
        and record.weights
        and not torch.equal(
            record.initial[index].to(record.weights[-1][index].dtype), record.weights[-1][index]
        )
    ]
    name = "parameters that must not move"
    if not wrong:
        return Check(name=name, against=ITSELF, passed=True), None
    wrong = [*dict.fromkeys(wrong)]
    details = tuple(f"{name} does not train, and moved" for name in wrong[:20])
    check = Check(name=name, against=ITSELF, passed=False, where=wrong[0], details=details)
    suspects = [*dict.fromkeys(map(owner, wrong))]
    why = "parameters that do not train have moved"
    return check, Fault(
        phase=Phase.OPTIMIZER, module=suspects[0], suspects=tuple(suspects[1:20]), why=why
    )


def _streams(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Random numbers: one stream on ranks that hold the same, others on those that do not."""
    details = [*_stream_problems(records)]
    check = Check(
        name="random streams", against=ITSELF, passed=not details, details=tuple(details[:20])
    )
    if not details:
        return check, None
    return check, Fault(phase=Phase.FORWARD, module="random streams", why=details[0])


def _stream_problems(records: Sequence[Record]) -> Iterator[str]:
    rules = {
        **dict.fromkeys(_OF_THE_PROCESS, ("pp",)),
        "tracker model-parallel-rng": ("pp", "tp"),
        "tracker expert-parallel-rng": ("pp", "ep", "expt_tp"),
    }
    for name, axes in rules.items():
        seen: dict[tuple[int, ...], tuple[str, int]] = {}
        owners: dict[str, tuple[tuple[int, ...], int]] = {}
        for record in records:
            state = record.generators.get(name)
            if state is None:
                continue
            place = tuple(record.coordinates[axis] for axis in axes)
            first, rank = seen.setdefault(place, (state, record.rank))
            if first != state:
                yield f"{name} differs on ranks {rank} and {record.rank}, which draw together"
            other, holder = owners.setdefault(state, (place, record.rank))
            if other != place:
                yield f"{name} is the same on ranks {holder} and {record.rank}, which draw apart"
