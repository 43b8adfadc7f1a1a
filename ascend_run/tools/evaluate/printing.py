"""Results as tables for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.tools.terminal.tables import table

from .results import HarnessScore, Perplexity, Programs, Results, Score, TaskResult

PERPLEXITY_HEADER: Final = ("file", "documents", "tokens", "loss", "perplexity")
SCORE_HEADER: Final = ("subject", "questions", "correct", "accuracy", "error")
HARNESS_HEADER: Final = ("task", "questions", "shots", "filter", "metric", "value", "error")


def lines_of(results: Results) -> Iterator[str]:
    """Yield the lines of all tables."""
    if results.perplexities:
        yield from table(PERPLEXITY_HEADER, [*map(perplexity_row, results.perplexities)])
    for task in results.tasks:
        if results.perplexities or task is not results.tasks[0]:
            yield ""
        yield f"{task.task}: form {task.form}, scored by {task.scored_by}"
        yield from table(SCORE_HEADER, score_rows(task))
        if task.programs is not None:
            yield program_line(task, task.programs)
    if results.harness:
        if results.perplexities or results.tasks:
            yield ""
        yield from table(HARNESS_HEADER, [*map(harness_row, results.harness)])


def harness_row(one: HarnessScore) -> Sequence[str]:
    """Return the cells of ``HARNESS_HEADER``."""
    counts = ("" if count is None else str(count) for count in (one.questions, one.shots))
    error = "" if one.error is None else f"{one.error:.4f}"
    return (one.task, *counts, one.filter, one.metric, f"{one.value:.4f}", error)


def perplexity_row(one: Perplexity) -> Sequence[str]:
    """Return the cells of ``PERPLEXITY_HEADER``."""
    return (
        one.name,
        str(one.documents),
        str(one.tokens),
        f"{one.loss:.4f}",
        f"{one.perplexity:.4f}",
    )


def score_rows(task: TaskResult) -> list[Sequence[str]]:
    """Return a row of ``SCORE_HEADER`` for each subject, and one of all if there are several."""
    scores = task.scores()
    return [*map(_score_row, [*scores, *([task.total] if len(scores) > 1 else [])])]


def program_line(task: TaskResult, programs: Programs) -> str:
    """Return pass@k, and how the programs were written."""
    found = ", ".join(f"pass@{k} {100 * value:.2f}%" for k, value in task.pass_at().items())
    each = "one program" if programs.samples == 1 else f"{programs.samples} programs"
    return f"{found}: {each} for each question, by {programs.sampling}"


def _score_row(score: Score) -> Sequence[str]:
    return (
        score.subject,
        str(score.questions),
        str(score.correct),
        f"{100 * score.accuracy:.2f}%",
        f"{100 * score.standard_error:.2f}%",
    )
