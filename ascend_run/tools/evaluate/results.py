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


@attrs.frozen(kw_only=True)
class Score:
    """Of a subject, or of all."""

    subject: str
    questions: int
    correct: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    @property
    def standard_error(self) -> float:
        """Of the accuracy, as the mean of independent questions."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.questions)


@attrs.frozen(kw_only=True)
class TaskResult:
    """Of one benchmark."""

    task: str
    form: str
    scored_by: str
    judged: tuple[Judged, ...]

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
    correct = sum(one.correct for one in judged)
    return Score(subject=subject, questions=len(judged), correct=correct)


@attrs.frozen(kw_only=True)
class Results:
    """Of one model."""

    model: str
    perplexities: tuple[Perplexity, ...] = ()
    tasks: tuple[TaskResult, ...] = ()

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
                    **({"answers": [*map(attrs.asdict, one.judged)]} if answers else {}),
                }
                for one in self.tasks
            ],
        }


def _fields(score: Score) -> dict[str, Any]:
    return {
        "questions": score.questions,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "standard_error": score.standard_error,
    }


def _finite(value: float) -> float | None:
    """Return a number that JSON has."""
    return value if math.isfinite(value) else None
