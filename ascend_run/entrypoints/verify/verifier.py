"""From a question to its verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ascend_run.core.verify.verdict import Check, Fault, Outcome, Phase, Verdict
from ascend_run.plugin_api import Numerics

from .questions import Question, Side
from .ranks import Fault as Planted
from .ranks import Ranks
from .sides import Sides, sides_of

if TYPE_CHECKING:
    from ascend_run.core.verify.comparison import Comparison
    from ascend_run.core.verify.record import Record

Pair = tuple[Side, "list[Record]", "list[Record]"]
"""A reference, the candidate's records beside it, and its own."""
Tell = Callable[[str, int, int], None]
"""What is being done, steps done, steps in all."""

_PHASES = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


class Verifier:
    """Answers questions; runs without plugins are made once and kept.

    Args:
        ranks: Where runs are made.
        tell: Told of progress.
    """

    def __init__(self, ranks: Ranks, tell: Tell = lambda what, done, total: None) -> None:
        self._ranks, self._tell = ranks, tell
        self._made: dict[str, list[Record]] = {}

    def __call__(self, question: Question, fault: Planted = None) -> Verdict:
        """
        Args:
            fault: Planted in the candidate; see the package's docstring.

        Raises:
            AscendRunError: What is asked for cannot run.
        """
        sides = sides_of(question)
        references = [side for side in (sides.plain, sides.same_layout, sides.against) if side]
        extra = 2 * ((sides.with_dropout is not None) + (sides.own_precision is not None))
        total = len(references) + 2 + extra
        made = []
        for done, side in enumerate(references):
            self._tell(side.name, done, total)
            made.append((side, self._reference(side)))
        self._tell(sides.candidate.name, len(references), total)
        candidate = self._ranks(sides.candidate, fault)
        dropping = own = None
        if sides.with_dropout is not None:
            mine, its = sides.with_dropout
            self._tell(f"{mine.name}, with dropout", len(references) + 1, total)
            dropping = (its, self._ranks(mine, fault), self._reference(its))
        if sides.own_precision is not None:
            mine, its = sides.own_precision.candidate, sides.own_precision.reference
            self._tell(mine.name, total - 3, total)
            own = (its, self._ranks(mine, fault), self._reference(its))
        self._tell("comparing", total - 1, total)
        verdict = judge(sides, candidate, made, dropping, own)
        self._tell("done", total, total)
        return verdict

    def _reference(self, side: Side) -> list[Record]:
        request = {**side.as_request(), "name": ""}
        key = json.dumps(request, sort_keys=True)
        if key not in self._made:
            self._made[key] = self._ranks(side)
        return self._made[key]


def judge(
    sides: Sides,
    candidate: list[Record],
    references: list[tuple[Side, list[Record]]],
    dropping: Pair | None = None,
    own: Pair | None = None,
) -> Verdict:
    """Compare, and decide.

    Args:
        dropping: With dropout.
        own: In the precision that the run trains in.
    """
    from ascend_run.core.verify.comparison import compare
    from ascend_run.core.verify.invariants import invariants
    from ascend_run.core.verify.own_precision import compare_own

    declares_bitwise = bool(sides.declared) and all(
        numerics is Numerics.BITWISE for numerics in sides.declared.values()
    )
    found: list[tuple[Side, Comparison]] = []
    pairs = [(side, candidate, records) for side, records in references]
    for side, mine, records in [*pairs, *([dropping] if dropping else [])]:
        same_layout = _is_same_layout(mine, records)
        comparison = compare(
            mine,
            records,
            against=side.name,
            exact=declares_bitwise and same_layout,
            same_layout=same_layout,
        )
        found.append((side, comparison))
    own_checks, own_fault = invariants(candidate, references[0][1])
    if dropping is not None:
        more_checks, more_fault = invariants(dropping[1], dropping[2])
        own_checks = [
            *own_checks,
            *(attrs.evolve(c, name=f"{c.name}, dropout") for c in more_checks),
        ]
        own_fault = own_fault or more_fault
    checks: list[Check] = [*own_checks, *(c for _, comparison in found for c in comparison.checks)]
    fault = _earliest([comparison.fault for _, comparison in found], own_fault)
    if own is not None:
        assert sides.own_precision is not None
        side, mine, its = own
        half_checks, half_fault = compare_own(
            mine,
            its,
            references[0][1],
            against=side.name,
            precision=sides.own_precision.name,
            bitwise=declares_bitwise and _is_same_layout(mine, its),
        )
        checks += half_checks
        # What the exact runs have found they name better.
        fault = fault or half_fault
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
    )


def _is_same_layout(candidate: list[Record], reference: list[Record]) -> bool:
    return candidate[0].sizes == reference[0].sizes and len(candidate) == len(reference)


def _outcome(checks: list[Check], same_bits: bool) -> Outcome:
    if not all(check.passed for check in checks):
        return Outcome.DIVERGES
    return Outcome.BITWISE if same_bits else Outcome.WITHIN


def _earliest(faults: list[Fault | None], own: Fault | None) -> Fault | None:
    """The one that a step reaches first; a comparison names it better than a run by itself."""
    known = [fault for fault in (*faults, own) if fault is not None]
    if not known:
        return None
    return min(known, key=_rank)


def _rank(fault: Fault) -> tuple[bool, int, bool]:
    """Other random numbers are named where they are all that differs; a module before a word."""
    vague = fault.module in ("optimizer", "gradient norm", "loss")
    return fault.module == "random streams", _PHASES.index(fault.phase), vague
