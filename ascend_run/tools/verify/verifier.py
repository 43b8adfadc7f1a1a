"""Execute the runs of a question, and return the verdict on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ascend_run.tools.verify.compare.verdict import Verdict

from .exercising import cases, exercises, runs_without
from .judging import Pair, judge
from .oracle import ORACLE, oracle_record
from .questions import Question, Side
from .ranks import Fault as Planted
from .ranks import Ranks
from .resuming import stop_and_resume
from .sides import Sides, sides_of

if TYPE_CHECKING:
    from ascend_run.tools.verify.capture.record import Record
    from ascend_run.tools.verify.second_oracle import FamilyComparison

Report = Callable[[str, int, int], None]
"""Progress callback: name of the stage, stages done, total stages."""


class Verifier:
    """Verifies questions; the records of reference runs are cached.

    Args:
        ranks: Executes the runs.
        report: Called with the progress.
    """

    def __init__(self, ranks: Ranks, report: Report = lambda stage, done, total: None) -> None:
        self._ranks, self._report = ranks, report
        self._references: dict[str, list[Record]] = {}
        self._families: dict[str, FamilyComparison] = {}
        self._done = self._total = 0

    def __call__(self, question: Question, fault: Planted = None) -> Verdict:
        """
        Args:
            fault: Fault to plant in the candidate; see the package's docstring.

        Raises:
            AscendRunError: One of the runs cannot start.
        """
        sides = sides_of(question)
        references = [side for side in (sides.plain, sides.same_layout, sides.against) if side]
        half = sides.training_precision
        in_half = None if half is None else (half.candidate, half.reference)
        more = [pair for pair in (sides.with_dropout, in_half) if pair is not None]
        evidence = runs_without(sides)
        runs = len(references) + len(evidence) + 1 + 2 * len(more)
        runs += (sides.masks is not None) + 3 * (sides.resumable is not None)
        self._done, self._total = 0, runs + 2 + (not sides.unknown) + sides.has_second_oracle
        self._next("starting ranks")
        self._ranks.start([*references, sides.candidate])
        # All references first: ranks are shared, and have not imported the plugins under test yet.
        recorded = [(side, self._reference(side)) for side in references]
        for side in (*(reference for _, reference in more), *evidence):
            self._reference(side)
        candidate = self._run(sides.candidate, fault)
        with_dropout = self._pair(sides.with_dropout, fault)
        in_training_precision = self._pair(in_half, fault)
        masks = None if sides.masks is None else self._run(sides.masks, fault)
        resumed = None
        if sides.resumable is not None:
            resumed = stop_and_resume(self._ranks, sides.resumable, fault, self._next)
        oracle = None if sides.unknown else self._oracle(sides.plain, recorded[0][1])
        self._next("comparing")
        verdict = judge(
            sides,
            candidate,
            recorded,
            with_dropout,
            in_training_precision,
            masks,
            resumed,
            oracle,
        )
        if sides.has_second_oracle:
            verdict = self._family(sides.plain, recorded[0][1]).added_to(verdict)
        half_records = None if in_training_precision is None else in_training_precision[1]
        verdict = verdict.with_exercises(
            exercises(sides, candidate, self._reference), cases(sides, candidate, half_records)
        )
        self._report("done", self._total, self._total)
        return verdict

    def run_references(self, questions: Iterable[Question]) -> None:
        """Execute the references of several questions, before any of their candidates."""
        every = [sides_of(question) for question in questions]
        references = [side for sides in every for side in _references(sides)]
        self._done, self._total = 0, len(references) + 1
        self._next("starting ranks")
        self._ranks.start([*references, *(sides.candidate for sides in every)])
        for side in references:
            self._reference(side)

    def _run(self, side: Side, fault: Planted = None) -> list[Record]:
        self._next(side.name)
        return self._ranks(side, fault)

    def _pair(self, sides: tuple[Side, Side] | None, fault: Planted) -> Pair | None:
        """Execute a candidate whose reference has been executed; None if there is none."""
        if sides is None:
            return None
        candidate, reference = sides
        return reference, self._run(candidate, fault), self._references[_key(reference)]

    def _next(self, stage: str) -> None:
        self._report(stage, self._done, self._total)
        self._done += 1

    def _oracle(self, plain: Side, records: list[Record]) -> list[Record]:
        key = f"{ORACLE} {_key(plain)}"
        self._next(ORACLE)
        if key not in self._references:
            self._references[key] = [oracle_record(plain.prepare(), records[0], plain.steps)]
        return self._references[key]

    def _family(self, plain: Side, records: list[Record]) -> FamilyComparison:
        from .second_oracle import TRANSFORMERS, compare_with_transformers

        self._next(TRANSFORMERS)
        key = _key(plain)
        if key not in self._families:
            self._families[key] = compare_with_transformers(plain.prepare(), records[0])
        return self._families[key]

    def _reference(self, side: Side) -> list[Record]:
        key = _key(side)
        if key in self._references:
            self._done += 1
        else:
            self._references[key] = self._run(side)
        return self._references[key]


def _key(side: Side) -> str:
    return json.dumps({**side.as_request(), "name": ""}, sort_keys=True)


def _references(sides: Sides) -> Iterator[Side]:
    """Yield all runs without the plugins under test."""
    for side in (sides.plain, sides.same_layout, sides.against):
        if side is not None:
            yield side
    if sides.with_dropout is not None:
        yield sides.with_dropout[1]
    if sides.training_precision is not None:
        yield sides.training_precision.reference
