"""Judge the answers to questions that fit into the model's longest text. Imports no torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import attrs

from ascend_run.plugin_api import ConfigError

from .asking import TaskOptions
from .prompts import Form, Prompt, Question, Subject
from .protocol import AnsweringModel
from .readings import Reading
from .results import Judged
from .sandbox import Outcome, SandboxError, run_program
from .tasks.task import Task

_MOST_PROGRAMS: Final = 8
"""That run at a time; each may take its limit of memory."""


@attrs.frozen(kw_only=True)
class Asked:
    """A question with its prompt; None: it is too long for the model."""

    subject: Subject
    question: Question
    shown: str
    prompt: Prompt | None
    num_examples: int

    def judged(self, reading: Reading, *, correct: bool) -> Judged:
        """Return the question with an answer."""
        return Judged(
            subject=self.subject.name,
            number=self.question.number,
            question=self.shown,
            prompt=None if self.prompt is None else self.prompt.shown,
            examples=self.num_examples,
            expected=self.question.expected,
            answer=reading.answer,
            correct=correct,
            why=reading.how,
        )


def num_new(task: Task, options: TaskOptions) -> int:
    """Return the most tokens of a generated answer."""
    return options.max_new_tokens or task.max_new_tokens


def by_log_probability(
    task: Task, asked: Sequence[Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[Judged]:
    """Yield the label of each question with the largest log-probability."""
    gap = "" if options.form is Form.CHAT else task.wording.gap
    pairs = [
        (one.prompt, gap + label)
        for one in asked
        for label in one.question.labels
        if one.prompt is not None
    ]
    values = model.log_probabilities(pairs)
    for one in asked:
        scores = tuple((label, next(values)) for label in one.question.labels)
        answer, _ = max(scores, key=lambda pair: pair[1])  # the first of equal ones
        reading = Reading(answer=answer, how="it has the largest log-probability")
        correct = answer == one.question.expected
        yield attrs.evolve(one.judged(reading, correct=correct), log_probabilities=scores)


def by_text(
    task: Task, asked: Sequence[Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[Judged]:
    """Yield the answer that each generated text gives."""
    for one, text in zip(asked, _texts(task, asked, model, options), strict=True):
        reading = task.read(text, one.question)
        found = reading.answer
        correct = found is not None and task.same(found, one.question.expected)
        yield attrs.evolve(one.judged(reading, correct=correct), text=text)


def by_program(
    task: Task, asked: Sequence[Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[Judged]:
    """Run the program that each generated text is part of, beside the generation of the next ones.

    Raises:
        ConfigError: One could not be confined.
    """
    assert options.programs is not None
    limits, build = options.programs.limits, task.program
    assert build is not None
    waiting: deque[tuple[Asked, str, Future[Outcome]]] = deque()
    pool = ThreadPoolExecutor(min(_MOST_PROGRAMS, len(os.sched_getaffinity(0))))
    try:
        for one, text in zip(asked, _texts(task, asked, model, options), strict=True):
            program = build(text, one.question, options.form)
            waiting.append((one, text, pool.submit(run_program, program, limits)))
            while waiting and waiting[0][2].done():
                yield _of_program(*waiting.popleft())
        while waiting:
            yield _of_program(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _of_program(one: Asked, text: str, run: Future[Outcome]) -> Judged:
    try:
        outcome = run.result()
    except (SandboxError, OSError) as error:
        raise ConfigError(f"a program could not be confined, and was not run: {error}") from None
    reading = Reading(answer="passed" if outcome.passed else "failed", how=outcome.how)
    return attrs.evolve(one.judged(reading, correct=outcome.passed), text=text)


def _texts(
    task: Task, asked: Sequence[Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[str]:
    prompts = [one.prompt for one in asked if one.prompt is not None]
    stop = () if options.form is Form.CHAT else task.stop
    sampling = None
    if task.program is not None and options.programs is not None:
        sampling = options.programs.sampling
    return model.answers(prompts, num_new(task, options), stop, sampling)
