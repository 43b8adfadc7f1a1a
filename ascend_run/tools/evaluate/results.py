"""What was measured of one model, and its JSON. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Perplexity:
    """Of one name of data."""

    name: str
    documents: int
    tokens: int  #: That were predicted.
    loss: float  #: Mean negative log-likelihood of a token. Unit: nats.

    @property
    def perplexity(self) -> float:
        """Infinite where it exceeds the range of a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@attrs.frozen(kw_only=True)
class Judged:
    """A question with the model's answer."""

    subject: str
    number: int  #: Line or row in its file, from 1.
    question: str  #: With its choices.
    prompt: str | None  #: None: it would have been too long for the model.
    examples: int  #: In the prompt.
    expected: str
    answer: str | None  #: None: no answer was found.
    correct: bool
    why: str  #: Why this is the answer.
    text: str | None = None  #: That the model generated; None: it chose by log-probability.
    log_probabilities: tuple[tuple[str, float], ...] = ()
    """Of each label."""
    sample: int = 1  #: Of several answers to the question, from 1.


@attrs.frozen(kw_only=True)
class Score:
    """Of a subject, or of all."""

    subject: str
    questions: int
    correct: int  #: Answers.
    accuracy: float  #: Mean over questions of the share of correct answers.
    standard_error: float  #: Of the accuracy, as the mean of independent questions.


@attrs.frozen(kw_only=True)
class Programs:
    """How programs were written, of a task whose answers they are."""

    samples: int  #: Of each question.
    sampling: str


@attrs.frozen(kw_only=True)
class TaskResult:
    """Of one benchmark."""

    task: str
    form: str
    scored_by: str
    judged: tuple[Judged, ...]
    programs: Programs | None = None

    def pass_at(self) -> dict[int, float]:
        """Return pass@k for the usual k and for all samples; none if answers are no programs.

        The mean over questions of the probability that k of the n samples have a correct one:
        1 - C(n - c, k) / C(n, k) with c correct. Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
        """
        if self.programs is None:
            return {}
        n, by_question = self.programs.samples, _by_question(self.judged)
        return {
            k: math.fsum(
                1 - math.comb(n - sum(correct), k) / math.comb(n, k) for correct in by_question
            )
            / len(by_question)
            for k in sorted({1, 10, 100, n})
            if k <= n
        }

    def scores(self) -> list[Score]:
        """Return one score for each subject."""
        by_subject: dict[str, list[Judged]] = {}
        for one in self.judged:
            by_subject.setdefault(one.subject, []).append(one)
        return [_score(name, judged) for name, judged in by_subject.items()]

    @property
    def total(self) -> Score:
        """The score of all questions together."""
        return _score("total", self.judged)


def _score(subject: str, judged: Sequence[Judged]) -> Score:
    shares = [sum(correct) / len(correct) for correct in _by_question(judged)]
    mean = math.fsum(shares) / len(shares)
    variance = math.fsum(share * share for share in shares) / len(shares) - mean * mean
    return Score(
        subject=subject,
        questions=len(shares),
        correct=sum(one.correct for one in judged),
        accuracy=mean,
        standard_error=math.sqrt(max(0.0, variance) / len(shares)),
    )


def _by_question(judged: Sequence[Judged]) -> list[list[bool]]:
    """Return for each question whether each of its answers is correct."""
    found: dict[tuple[str, int], list[bool]] = {}
    for one in judged:
        found.setdefault((one.subject, one.number), []).append(one.correct)
    return [*found.values()]


@attrs.frozen(kw_only=True)
class HarnessScore:
    """One metric of a task of lm-evaluation-harness."""

    task: str
    metric: str
    filter: str  #: Of the answers, by the task; "none" is without one.
    value: float
    error: float | None  #: Standard error; None: it has none.
    shots: int | None  #: Examples before each question.
    questions: int | None

    @property
    def shown(self) -> str:
        """Metric and filter, as lm-evaluation-harness names them."""
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"


@attrs.frozen(kw_only=True)
class Results:
    """Of one model."""

    model: str
    perplexities: tuple[Perplexity, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    harness: tuple[HarnessScore, ...] = ()

    def record(self, *, answers: bool = False) -> dict[str, Any]:
        """Return what ``--json`` prints.

        Args:
            answers: With each question and its answer.
        """
        return {
            "model": self.model,
            "perplexity": [
                attrs.asdict(one) | {"perplexity": _finite(one.perplexity)}
                for one in self.perplexities
            ],
            "tasks": [
                {
                    "task": one.task,
                    "form": one.form,
                    "scored_by": one.scored_by,
                    **_fields(one.total),
                    "subjects": [
                        {"subject": score.subject, **_fields(score)} for score in one.scores()
                    ],
                    **_of_programs(one),
                    **({"answers": [*map(attrs.asdict, one.judged)]} if answers else {}),
                }
                for one in self.tasks
            ],
            "lm_eval": [attrs.asdict(one) | {"value": _finite(one.value)} for one in self.harness],
        }


def _fields(score: Score) -> dict[str, Any]:
    return {
        "questions": score.questions,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "standard_error": score.standard_error,
    }


def _of_programs(task: TaskResult) -> dict[str, Any]:
    if task.programs is None:
        return {}
    pass_at = {str(k): value for k, value in task.pass_at().items()}
    return {"programs": attrs.asdict(task.programs), "pass_at": pass_at}


def _finite(value: float) -> float | None:
    """Return a number that JSON has."""
    return value if math.isfinite(value) else None
