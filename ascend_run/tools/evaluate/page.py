"""The results as an HTML page: one file that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run import __version__
from ascend_run.tools.pages.frame import document, section
from ascend_run.tools.pages.markup import Markup, details, element, join, table
from ascend_run.tools.report.summary import utc

from .printing import (
    HARNESS_HEADER,
    PERPLEXITY_HEADER,
    SCORE_HEADER,
    harness_row,
    perplexity_row,
    program_line,
    score_rows,
)
from .results import Judged, Results, TaskResult


def render_page(results: Results, *, written: float) -> str:
    """Return the page as text: the tables, and each question with its answer.

    Args:
        written: Unix time, for the footer.
    """
    return document(
        title=f"{results.model} \N{MIDDLE DOT} ascend-run evaluate",
        brand="ascend-run evaluate",
        top=element("h1", results.model),
        sections=[*_perplexities(results), *map(_task, results.tasks), *_harness(results)],
        foot=element("p", f"Written {utc(written)} by ascend-run {__version__}."),
        data={},
        scripts=(),
    )


def _perplexities(results: Results) -> Iterator[Markup]:
    if results.perplexities:
        rows = map(perplexity_row, results.perplexities)
        yield section("perplexity", "Perplexity", table(PERPLEXITY_HEADER, rows))


def _harness(results: Results) -> Iterator[Markup]:
    if results.harness:
        rows = map(harness_row, results.harness)
        yield section("lm-eval", "lm-evaluation-harness", table(HARNESS_HEADER, rows))


def _task(task: TaskResult) -> Markup:
    by_subject: dict[str, list[Judged]] = {}
    for one in task.judged:
        by_subject.setdefault(one.subject, []).append(one)
    how = f"Questions in the form {task.form}, scored by {task.scored_by}."
    return section(
        f"task-{task.task}",
        task.task,
        element("p", how, class_="note"),
        table(SCORE_HEADER, score_rows(task)),
        None if task.programs is None else element("p", program_line(task, task.programs)),
        *(
            details(f"{subject}: {len(judged)} questions", *map(_question, judged))
            for subject, judged in by_subject.items()
        ),
    )


def _question(one: Judged) -> Markup:
    mark = "\N{CHECK MARK} right" if one.correct else "\N{BALLOT X} wrong"
    answer = "no answer" if one.answer is None else f"answer {one.answer}"
    which = f"{one.number}" if one.sample == 1 else f"{one.number}, answer {one.sample}"
    summary = f"{mark} \N{MIDDLE DOT} {which}: {answer}, expected {one.expected}"
    why = f"Why: {one.why}. Examples before it: {one.examples}."
    return details(
        summary,
        element("pre", one.question),
        None if one.text is None else join((element("p", "The model wrote:"), _pre(one.text))),
        _log_probabilities(one),
        element("p", why, class_="note"),
    )


def _pre(text: str) -> Markup:
    return element("pre", text)


def _log_probabilities(one: Judged) -> Markup | None:
    if not one.log_probabilities:
        return None
    rows = ((label, f"{value:.4f}") for label, value in one.log_probabilities)
    return table(("answer", "log-probability"), rows)
