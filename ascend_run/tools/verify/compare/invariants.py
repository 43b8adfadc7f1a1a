"""Invariants of a single run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.tools.verify.capture.record import Record

from .replicas import replica_checks
from .training import copied, frozen, moved
from .verdict import ITSELF, Check, Fault, Phase

_OF_THE_PROCESS: Final = ("torch", "python", "numpy")


def invariants(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> tuple[list[Check], Fault | None]:
    """Return all checks of a run by itself, and the fault that the first failed one indicates.

    Args:
        reference: A parameter that does not change in the reference either is not a fault.
    """
    found = [
        *replica_checks(records),
        moved(records, reference),
        frozen(records),
        copied(records),
        _streams(records),
    ]
    faults = [fault for check, fault in found if fault is not None]
    return [check for check, _ in found], faults[0] if faults else None


def _streams(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Check that ranks with the same shards share a random stream, and others do not."""
    details = [*_stream_problems(records)]
    check = Check(
        name="random streams",
        against=ITSELF,
        passed=not details,
        applies=len(records) > 1,
        details=tuple(details[:20]),
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
                yield f"{name} differs on ranks {rank} and {record.rank}, which must share it"
            other, holder = owners.setdefault(state, (place, record.rank))
            if other != place:
                yield (
                    f"{name} is the same on ranks {holder} and {record.rank}, which must not share "
                    "it"
                )
