"""Two evaluations side by side. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ascend_run.plugin_api import DataError
from ascend_run.tools.terminal.tables import table

from .results import HarnessScore, Judged, Results, TaskResult


@attrs.frozen(kw_only=True)
class PerplexityChange:
    """Of one name of data that both have."""

    name: str
    a: float  #: Loss.
    b: float


@attrs.frozen(kw_only=True)
class ScoreChange:
    """Of the questions of a subject that both have."""

    task: str
    subject: str
    questions: int
    a: int  #: Correct.
    b: int
    gained: int  #: Wrong in A, and right in B.
    lost: int  #: Right in A, and wrong in B.


@attrs.frozen(kw_only=True)
class MetricChange:
    """Of a metric of lm-evaluation-harness over as many questions and examples."""

    task: str
    filter: str
    metric: str
    a: float
    b: float


@attrs.frozen(kw_only=True)
class Comparison:
    """What both evaluations have, and notes on the rest."""

    models: tuple[str, str]
    perplexities: tuple[PerplexityChange, ...]
    scores: tuple[ScoreChange, ...]
    metrics: tuple[MetricChange, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return attrs.asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the tables."""
        yield f"A: {self.models[0]}"
        yield f"B: {self.models[1]}"
        if self.perplexities:
            yield ""
            rows = [
                (one.name, f"{one.a:.4f}", f"{one.b:.4f}", f"{one.b - one.a:+.4f}")
                for one in self.perplexities
            ]
            yield from table(("file", "loss A", "loss B", "B - A"), rows)
        if self.scores:
            yield ""
            header = ("task", "subject", "questions", "A", "B", "B - A", "gained", "lost")
            yield from table(header, [*map(_score_row, self.scores)])
        if self.metrics:
            yield ""
            rows = [
                (*names, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}")
                for *names, a, b in map(attrs.astuple, self.metrics)
            ]
            yield from table(("task", "filter", "metric", "A", "B", "B - A"), rows)
        yield from self.notes


def _score_row(one: ScoreChange) -> Sequence[str]:
    return (
        one.task,
        one.subject,
        str(one.questions),
        f"{100 * one.a / one.questions:.2f}%",
        f"{100 * one.b / one.questions:.2f}%",
        f"{100 * (one.b - one.a) / one.questions:+.2f}%",
        str(one.gained),
        str(one.lost),
    )


def compared(a: Results, b: Results) -> Comparison:
    """Compare what two evaluations measured of the same data.

    Raises:
        DataError: They have nothing in common.
    """
    notes: list[str] = []
    losses = {one.name: one for one in b.perplexities}
    perplexities = []
    for one in a.perplexities:
        other = losses.get(one.name)
        if other is not None and other.tokens == one.tokens:
            perplexities.append(PerplexityChange(name=one.name, a=one.loss, b=other.loss))
        elif other is not None:
            notes.append(f"{one.name}: {one.tokens} tokens in A, {other.tokens} in B")
    tasks = {one.task: one for one in b.tasks}
    scores = [
        change
        for task in a.tasks
        if task.task in tasks
        for change in _score_changes(task, tasks[task.task], notes)
    ]
    metrics = tuple(_metric_changes(a, b))
    for here, there, names in (
        ("A", "B", _names(a) - _names(b)),
        ("B", "A", _names(b) - _names(a)),
    ):
        notes += [f"{name}: in {here}, and not in {there}" for name in sorted(names)]
    if not perplexities and not scores and not metrics:
        raise DataError("these evaluations have nothing in common", notes)
    return Comparison(
        models=(a.model, b.model),
        perplexities=tuple(perplexities),
        scores=tuple(scores),
        metrics=metrics,
        notes=tuple(notes),
    )


def _names(results: Results) -> set[str]:
    names = {one.name for one in results.perplexities} | {one.task for one in results.tasks}
    return names | {" ".join(map(str, _metric(one))) for one in results.harness}


def _metric(one: HarnessScore) -> tuple[str, ...]:
    counts = f"of {one.questions} questions after {one.shots} examples"
    return one.task, one.filter, one.metric, counts


def _metric_changes(a: Results, b: Results) -> Iterator[MetricChange]:
    others = {_metric(one): one.value for one in b.harness}
    for one in a.harness:
        if (key := _metric(one)) in others:
            task, name, metric, _ = key
            yield MetricChange(task=task, filter=name, metric=metric, a=one.value, b=others[key])


def _score_changes(a: TaskResult, b: TaskResult, notes: list[str]) -> Iterator[ScoreChange]:
    for name, of_a, of_b in (("form", a.form, b.form), ("scored by", a.scored_by, b.scored_by)):
        if of_a != of_b:
            notes.append(f"{a.task}: {name} {of_a} in A, {of_b} in B")
    others = {_key(one): one for one in b.judged}
    pairs = [(one, others[_key(one)]) for one in a.judged if _key(one) in others]
    missing = len(a.judged) + len(b.judged) - 2 * len(pairs)
    if missing:
        notes.append(f"{a.task}: {missing} questions are in one of the two only")
    by_subject: dict[str, list[tuple[Judged, Judged]]] = {}
    for pair in pairs:
        by_subject.setdefault(pair[0].subject, []).append(pair)
    for subject, both in by_subject.items():
        yield _change(a.task, subject, both)
    if len(by_subject) > 1:
        yield _change(a.task, "total", pairs)


def _key(one: Judged) -> tuple[str, int, str, int]:
    return one.subject, one.number, one.question, one.sample


def _change(task: str, subject: str, pairs: Sequence[tuple[Judged, Judged]]) -> ScoreChange:
    return ScoreChange(
        task=task,
        subject=subject,
        questions=len(pairs),
        a=sum(a.correct for a, _ in pairs),
        b=sum(b.correct for _, b in pairs),
        gained=sum(b.correct and not a.correct for a, b in pairs),
        lost=sum(a.correct and not b.correct for a, b in pairs),
    )
