"""Check that a step whose gradients overflow is skipped and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.tools.verify.capture.record import OF_OPTIMIZER, SCHEDULE, Record

from .full_tensors import owner
from .readings import SHOWN, shortened
from .verdict import ITSELF, Check, Fault, Phase


def skipped(records: Sequence[Record]) -> tuple[Check, Fault | None]:
    """Return the check, and the fault that it indicates; it applies to runs that took such a
    step."""
    changed = [
        (what, record.rank) for record in records for what in record.changed_by_overflow or ()
    ]
    details = [
        f"a step whose gradients are infinite changes {what} on rank {rank}"
        for what, rank in changed
    ]
    check = Check(
        name="skipped steps",
        against=ITSELF,
        passed=not details,
        applies=any(record.changed_by_overflow is not None for record in records),
        where=changed[0][0] if changed else "",
        details=shortened(details),
    )
    if not changed:
        return check, None
    suspects = dict.fromkeys(
        owner(what.partition(" ")[0]) for what, _ in changed if _is_weight(what)
    )
    only_schedule = all(what == SCHEDULE for what, _ in changed)
    return check, Fault(
        phase=Phase.OPTIMIZER,
        module="schedule" if only_schedule else "optimizer",
        suspects=tuple(suspects)[:SHOWN],
        why=details[0],
    )


def _is_weight(what: str) -> bool:
    return not what.startswith((SCHEDULE, OF_OPTIMIZER))
