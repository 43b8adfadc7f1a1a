"""Compare replicas of one tensor: within a pipeline stage, and tied weights of two stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from torch import Tensor

from ascend_run.testing.tensors import Replica
from ascend_run.tools.verify.capture.record import Record

from .full_tensors import assemble, owner
from .thresholds import FLOAT32_EPS, FLOAT64_EPS, GRADIENT
from .verdict import ITSELF, Check, Fault, Phase


@attrs.frozen
class _Reading:
    """Replicas that differ in what was recorded at one point of a run."""

    what: str
    phase: Phase
    differing: tuple[Replica, ...]
    step: int = 0
    """As in ``Fault``."""

    def of(self, is_kind: Callable[[Replica], bool]) -> _Reading:
        """Return it with the replicas of one kind only."""
        return attrs.evolve(self, differing=tuple(filter(is_kind, self.differing)))


def replica_checks(records: Sequence[Record]) -> list[tuple[Check, Fault | None]]:
    """Check that replicas are equal: gradients up to rounding, weights bitwise.

    The first check is of replicas within a pipeline stage, the second one of the tied embedding of
    the first and the last stage. Only what differs first is a fault: a later difference of the
    other kind may follow from it.
    """
    readings = [*_readings(records)]
    within = any(len(stages) > len(set(stages)) for stages in _stages_of_shards(records))
    across = any(len(set(stages)) > 1 for stages in _stages_of_shards(records))

    def is_tied(replica: Replica) -> bool:
        stages = (records[rank].coordinates["pp"] for rank in (replica.rank, replica.other))
        return len({*stages}) > 1

    kinds = (
        ("replicas over ranks", within, [r.of(lambda x: not is_tied(x)) for r in readings]),
        ("tied weights", across, [r.of(is_tied) for r in readings]),
    )
    first = min(_start(found) for _, _, found in kinds)
    return [
        (
            _check(name, found, applies=applies),
            _fault(records, found) if _start(found) == first < len(readings) else None,
        )
        for name, applies, found in kinds
    ]


def _stages_of_shards(records: Sequence[Record]) -> Iterable[list[int]]:
    """Return, for each shard, the pipeline stages of the ranks that hold it."""
    stages: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for record in records:
        for place in record.places:
            held = stages.setdefault((place.name, place.offset), [])
            held.append(record.coordinates["pp"])
    return stages.values()


def _readings(records: Sequence[Record]) -> Iterator[_Reading]:
    """Yield what was recorded, in the order of a run."""
    initial = assemble(records, lambda record: record.initial, trained=False).replicas
    yield _Reading("initial weights", Phase.FORWARD, initial)
    gradients = assemble(records, lambda record: record.gradients).replicas
    wrong = tuple(replica for replica in gradients if replica.error > GRADIENT)
    yield _Reading("gradients", Phase.BACKWARD, wrong)
    first = len(records[0].losses) - len(records[0].weights) + 1
    for index in range(len(records[0].weights)):

        def weights(record: Record, index: int = index) -> Sequence[Tensor]:
            return record.weights[index]

        found = assemble(records, weights, trained=False).replicas
        yield _Reading("weights", Phase.OPTIMIZER, found, first + index)


def _start(readings: Sequence[_Reading]) -> int:
    """Return the index of the first reading that differs; their number if none does."""
    differs = (index for index, reading in enumerate(readings) if reading.differing)
    return next(differs, len(readings))


def _shown(readings: Sequence[_Reading]) -> list[_Reading]:
    """Return the readings that differ; of the weights, those after the first such step."""
    found: dict[str, _Reading] = {}
    for reading in readings:
        if reading.differing:
            found.setdefault(reading.what, reading)
    return [*found.values()]


def _check(name: str, readings: Sequence[_Reading], *, applies: bool) -> Check:
    shown = _shown(readings)
    if not shown:
        return Check(name=name, against=ITSELF, passed=True, applies=applies)
    worst = max((r for reading in shown for r in reading.differing), key=lambda r: r.error)
    eps = FLOAT32_EPS if shown[0].phase is Phase.OPTIMIZER else FLOAT64_EPS
    details = [_described(r, reading.what) for reading in shown for r in reading.differing]
    return Check(
        name=name,
        against=ITSELF,
        passed=False,
        worst=worst.error,
        eps=worst.error / eps,
        where=worst.name,
        details=tuple(details[:20]),
    )


def _fault(records: Sequence[Record], readings: Sequence[_Reading]) -> Fault:
    shown = _shown(readings)
    phase = shown[0].phase
    names = dict.fromkeys(r.name for reading in shown for r in reading.differing)
    suspects = [*dict.fromkeys(map(owner, names))]
    if phase is Phase.OPTIMIZER and len(names) > 1 and 2 * len(names) > _num_copied(records):
        # If most of them differ, the cause is the optimizer rather than a module.
        suspects.insert(0, "optimizer")
    why = "replicas of a tensor differ between ranks"
    return Fault(
        phase=phase,
        module=suspects[0],
        suspects=tuple(suspects[1:20]),
        why=why,
        step=shown[0].step,
    )


def _num_copied(records: Sequence[Record]) -> int:
    """Number of trained parameters with a shard that is replicated."""
    held = Counter(
        (place.name, place.offset)
        for record in records
        for place in record.places
        if place.is_trained
    )
    return len({name for (name, _), count in held.items() if count > 1})


def _described(replica: Replica, what: str) -> str:
    return (
        f"{what} of {replica.name} on ranks {replica.other} and {replica.rank} differ by "
        f"{replica.error:.1e} of the largest value"
    )
