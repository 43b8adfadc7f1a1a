"""Results as tables for a terminal. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.tools.terminal.tables import table

from .results import Perplexity, Results, Score


def lines_of(results: Results) -> Iterator[str]:
    """Yield the lines of all tables."""
    if results.perplexities:
        header = ("file", "documents", "tokens", "loss", "perplexity")
        yield from table(header, [*map(_perplexity_row, results.perplexities)])
    for task in results.tasks:
        if results.perplexities or task is not results.tasks[0]:
            yield ""
        yield f"{task.task}: form {task.form}, scored by {task.scored_by}"
        scores = task.scores()
        rows = [*map(_score_row, [*scores, *([task.total] if len(scores) > 1 else [])])]
        yield from table(("subject", "questions", "correct", "accuracy", "error"), rows)


def _score_row(score: Score) -> Sequence[str]:
    return (
        score.subject,
        str(score.questions),
        str(score.correct),
        f"{100 * score.accuracy:.2f}%",
        f"{100 * score.standard_error:.2f}%",
    )


def _perplexity_row(one: Perplexity) -> Sequence[str]:
    return (
        one.name,
        str(one.documents),
        str(one.tokens),
        f"{one.loss:.4f}",
        f"{one.perplexity:.4f}",
    )
