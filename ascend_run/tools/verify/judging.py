"""Compare the records of the runs of a question, and decide on a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from ascend_run.plugin_api import Numerics
from ascend_run.tools.verify.compare.verdict import (
    FROZEN_CHANGED,
    Check,
    Fault,
    Outcome,
    Phase,
    Verdict,
)

from .building import RATE
from .dropout import probabilities
from .oracle import compared_with_oracle
from .questions import Side
from .sides import Sides

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.compare.comparison import Comparison
    from ascend_run.tools.verify.compare.resuming import ResumedRun

Pair = tuple[Side, "list[Record]", "list[Record]"]
"""A reference, the candidate's records to compare with it, and the reference's records."""

_PHASES = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def judge(
    sides: Sides,
    candidate: list[Record],
    references: list[tuple[Side, list[Record]]],
    with_dropout: Pair | None = None,
    in_training_precision: Pair | None = None,
    masks: list[Record] | None = None,
    resumed: ResumedRun | None = None,
    oracle: list[Record] | None = None,
) -> Verdict:
    """Compare the records and decide on a verdict.

    Args:
        with_dropout: The runs with dropout.
        in_training_precision: The runs in the precision that the run trains in.
        masks: The run of which dropout masks were recorded.
        resumed: The run that was stopped and resumed, and the one without a stop.
        oracle: The oracle's record of the plain run, which comes first among the references.
    """
    from ascend_run.tools.verify.compare.groups import groups_of
    from ascend_run.tools.verify.compare.slopes import by_differences

    declares_bitwise = bool(sides.declared) and all(
        numerics is Numerics.BITWISE for numerics in sides.declared.values()
    )
    pairs = [(side, candidate, records) for side, records in references]
    found = [
        (side, _compared(side, mine, records, declares_bitwise))
        for side, mine, records in [*pairs, *([with_dropout] if with_dropout else [])]
    ]
    between_runs = [comparison.fault for _, comparison in found]
    if oracle is not None:
        found.append(compared_with_oracle(*references[0], oracle))
    own_checks, own_fault = _invariants(candidate, references[0][1], with_dropout)
    slope_checks, slope_fault = by_differences(references[0][1], references[0][0].name)
    compared_checks = (check for _, comparison in found for check in comparison.checks)
    checks = [*own_checks, *slope_checks, *compared_checks]
    fault = _earliest([*(comparison.fault for _, comparison in found), slope_fault], own_fault)
    if fault is not None and not any((*between_runs, own_fault)):
        fault = attrs.evolve(fault, in_all_runs=True)
    further = _further(
        sides, references[0][1], in_training_precision, masks, resumed, declares_bitwise
    )
    for more_checks, more_fault in further:
        checks += more_checks
        # A fault that the exact runs show is located better by them.
        fault = fault or more_fault
    nearest = [c for side, c in found if side is sides.same_layout] or [c for _, c in found]
    return Verdict(
        outcome=_outcome(checks, nearest[0].same_bits),
        fault=fault,
        checks=tuple(checks),
        modules=found[0][1].modules,
        question=sides.candidate.name,
        declared={name: str(numerics) for name, numerics in sides.declared.items()},
        references=tuple(side.name for side, _ in found),
        notes=sides.notes,
        groups=groups_of(candidate, sides.candidate.values[RATE]),
    )


def _further(
    sides: Sides,
    exact: list[Record],
    in_training_precision: Pair | None,
    masks: list[Record] | None,
    resumed: ResumedRun | None,
    declares_bitwise: bool,
) -> Iterator[tuple[Sequence[Check], Fault | None]]:
    """Yield the checks of the other runs of the candidate, and the fault that each indicates.

    Args:
        exact: The plain run in float64 and float32.
    """
    if in_training_precision is not None:
        from ascend_run.tools.verify.compare.training_precision import compare_in_training_precision

        assert sides.training_precision is not None
        side, mine, expected = in_training_precision
        yield compare_in_training_precision(
            mine,
            expected,
            exact,
            against=side.name,
            precision=sides.training_precision.name,
            bitwise=declares_bitwise and _is_same_layout(mine, expected),
        )
    if masks is not None:
        from ascend_run.tools.verify.compare.dropout_masks import compare_masks

        assert sides.masks is not None
        check, fault = compare_masks(masks, probabilities(sides.masks))
        yield [check], fault
    if resumed is not None:
        from ascend_run.tools.verify.compare.resuming import compare_resumed

        yield compare_resumed(resumed)


def _compared(
    side: Side, candidate: list[Record], reference: list[Record], declares_bitwise: bool
) -> Comparison:
    from ascend_run.tools.verify.compare.comparison import compare

    same_layout = _is_same_layout(candidate, reference)
    return compare(
        candidate,
        reference,
        against=side.name,
        exact=declares_bitwise and same_layout,
        same_layout=same_layout,
    )


def _invariants(
    candidate: list[Record], plain: list[Record], with_dropout: Pair | None
) -> tuple[list[Check], Fault | None]:
    """Check the invariants of the candidate, and of its run with dropout if there is one."""
    from ascend_run.tools.verify.compare.invariants import invariants

    checks, fault = invariants(candidate, plain)
    if with_dropout is None:
        return checks, fault
    more_checks, more_fault = invariants(with_dropout[1], with_dropout[2])
    named = [attrs.evolve(check, name=f"{check.name}, dropout") for check in more_checks]
    return [*checks, *named], fault or more_fault


def _is_same_layout(candidate: list[Record], reference: list[Record]) -> bool:
    return candidate[0].sizes == reference[0].sizes and len(candidate) == len(reference)


def _outcome(checks: list[Check], same_bits: bool) -> Outcome:
    if not all(check.passed for check in checks):
        return Outcome.DIVERGES
    return Outcome.BITWISE if same_bits else Outcome.WITHIN


def _earliest(faults: list[Fault | None], own: Fault | None) -> Fault | None:
    """The fault that a step reaches first; on a tie, that of a comparison, which locates it
    better."""
    known = [fault for fault in (*faults, own) if fault is not None]
    if not known:
        return None
    return min(known, key=_rank)


def _rank(fault: Fault) -> tuple[bool, int, bool, bool, float]:
    """Sort key: random streams only if nothing else differs, then the first batch by phase, then
    the steps: frozen parameters that train, modules, and in the order of the steps."""
    vague = fault.module in ("optimizer", "gradient norm", "loss")
    phase = _PHASES.index(Phase.OPTIMIZER if fault.step else fault.phase)
    is_effect, step = fault.why != FROZEN_CHANGED, fault.step or math.inf
    return fault.module == "random streams", phase, is_effect, vague, step
