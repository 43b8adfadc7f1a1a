"""Check the gradients of the plain run against differences of its loss.

All other comparisons are between runs, so they do not see an error that both have: a backward that
is not the derivative of its forward, or a parameter that a term of the loss does not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ascend_run.tools.verify.capture.record import Record

from .full_tensors import owner
from .readings import SHOWN, shortened
from .thresholds import FLOAT64_EPS
from .verdict import ITSELF, Check, Fault, Phase

NAME: Final = "gradients by differences"


def by_differences(records: Sequence[Record], run: str) -> tuple[list[Check], Fault | None]:
    """Return the check and the fault that it indicates; no check if nothing was compared.

    Args:
        run: Name of the run on one rank.
    """
    derivatives = [derivative for record in records for derivative in record.derivatives]
    if not derivatives:
        return [], None
    wrong = [derivative for derivative in derivatives if not derivative.agrees]
    worst = max(derivatives, key=lambda derivative: derivative.error)
    details = [derivative.problem() for derivative in wrong]
    if not any(derivative.is_measured for derivative in derivatives):
        details.append("no slope of the loss could be measured: it is not smooth")
    check = Check(
        name=NAME,
        against=ITSELF,
        passed=not details,
        worst=worst.error,
        eps=worst.error / FLOAT64_EPS,
        where=worst.name if wrong else "",
        details=shortened(details),
    )
    if not wrong:
        return [check], None
    # A wrong backward makes the gradients of all earlier modules wrong as well.
    found = [record.wrong_backward for record in records if record.wrong_backward]
    owners = (owner(derivative.name) for derivative in reversed(wrong))
    suspects = [*dict.fromkeys((*found, *owners))]
    return [check], Fault(
        phase=Phase.BACKWARD,
        module=suspects[0],
        suspects=tuple(suspects[1:SHOWN]),
        why=f"{wrong[-1].problem()} ({run})",
    )
