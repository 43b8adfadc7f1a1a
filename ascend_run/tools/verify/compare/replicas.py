"""Compare replicas of one tensor: within a pipeline stage, and tied weights of two stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ascend_run.testing.tensors import Replica
from ascend_run.tools.verify.capture.record import Record

from .full_tensors import assemble, owner
from .thresholds import FLOAT32_EPS, FLOAT64_EPS, GRADIENT
from .verdict import ITSELF, Check, Fault, Phase

Kind = Callable[[Replica], bool]


def replicas(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Check replicas within a stage: gradients up to rounding, weights bitwise."""
    within = any(len(stages) > len(set(stages)) for stages in _stages_of_shards(records))
    return _copies(
        "replicas over ranks", records, lambda r: not _crosses_stages(records, r), applies=within
    )


def tied(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Check the tied embedding of the first and the last pipeline stage likewise."""
    across = any(len(set(stages)) > 1 for stages in _stages_of_shards(records))
    return _copies("tied weights", records, lambda r: _crosses_stages(records, r), applies=across)


def _stages_of_shards(records: Sequence[Record]) -> Iterable[list[int]]:
    """Return, for each shard, the pipeline stages of the ranks that hold it."""
    stages: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for record in records:
        for place in record.places:
            held = stages.setdefault((place.name, place.offset), [])
            held.append(record.coordinates["pp"])
    return stages.values()


def _crosses_stages(records: Sequence[Record], replica: Replica) -> bool:
    return records[replica.other].coordinates["pp"] != records[replica.rank].coordinates["pp"]


def _copies(
    name: str, records: Sequence[Record], kind: Kind, *, applies: bool
) -> tuple[Check, Fault | None]:
    initial = [r for r in assemble(records, lambda x: x.initial, trained=False).replicas if kind(r)]
    gradients = [
        r
        for r in assemble(records, lambda x: x.gradients).replicas
        if r.error > GRADIENT and kind(r)
    ]
    weights = _weights(records, kind)
    phase = Phase.FORWARD if initial else Phase.BACKWARD if gradients else Phase.OPTIMIZER
    found = [*initial, *gradients, *weights]
    if not found:
        return Check(name=name, against=ITSELF, passed=True, applies=applies), None
    details = [
        *(_described(r, "initial weights") for r in initial),
        *(_described(r, "gradients") for r in gradients),
        *(_described(r, "weights") for r in weights),
    ]
    worst = max(found, key=lambda r: r.error)
    eps = FLOAT32_EPS if phase is Phase.OPTIMIZER else FLOAT64_EPS
    check = Check(
        name=name,
        against=ITSELF,
        passed=False,
        worst=worst.error,
        eps=worst.error / eps,
        where=worst.name,
        details=tuple(details[:20]),
    )
    suspects = [*dict.fromkeys(owner(r.name) for r in found)]
    names = {r.name for r in found}
    if phase is Phase.OPTIMIZER and len(names) > 1 and 2 * len(names) > _num_copied(records):
        # If most of them differ, the cause is the optimizer rather than a module.
        suspects.insert(0, "optimizer")
    why = "replicas of a tensor differ between ranks"
    return check, Fault(phase=phase, module=suspects[0], suspects=tuple(suspects[1:20]), why=why)


def _num_copied(records: Sequence[Record]) -> int:
    """Number of trained parameters with a shard that is replicated."""
    held = Counter(
        (place.name, place.offset)
        for record in records
        for place in record.places
        if place.is_trained
    )
    return len({name for (name, _), count in held.items() if count > 1})


def _weights(records: Sequence[Record], kind: Kind) -> list[Replica]:
    """Replicas that differ after the first step after which any do."""
    for step in range(len(records[0].weights)):

        def weights(record: Record, step: int = step) -> Sequence[Tensor]:
            return record.weights[step]

        found = assemble(records, weights, trained=False).replicas
        if found:
            return [r for r in found if kind(r)]
    return []


def _described(replica: Replica, what: str) -> str:
    return (
        f"{what} of {replica.name} on ranks {replica.other} and {replica.rank} differ by "
        f"{replica.error:.1e} of the largest value"
    )
