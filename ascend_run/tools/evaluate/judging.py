"""Ask a model the questions of a benchmark, and judge its answers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import attrs

from ascend_run.plugin_api import ConfigError, DataError

from .progress import Progress
from .prompts import Form, Prompt, Question, Subject
from .protocol import AnsweringModel
from .readings import Reading
from .results import Judged, TaskResult
from .tasks import TASKS
from .tasks.task import Task


class ScoredBy(StrEnum):
    """How the answer of a question with labels is found."""

    LOGPROB = "logprob"  #: The label with the largest log-probability after the prompt.
    TEXT = "text"  #: The label that the generated text names.


@attrs.frozen(kw_only=True)
class TaskOptions:
    """How questions are asked."""

    form: Form = Form.DIRECT
    scored_by: ScoredBy = ScoredBy.LOGPROB
    num_examples: int | None = None
    """In each prompt; None: the task's, if the files have so many."""
    limit: int | None = None
    """Questions of each subject; None: all."""
    max_new_tokens: int | None = None
    """None: the task's."""


@attrs.frozen(kw_only=True)
class LoadedTask:
    """A benchmark with its questions."""

    task: Task
    subjects: tuple[Subject, ...]


def loaded_tasks(named: Sequence[str], options: TaskOptions) -> list[LoadedTask]:
    """Read benchmarks, each named as ``NAME=PATH``.

    Raises:
        ConfigError: A name is unknown, or comes twice; lists all.
        DataError: Files are missing or malformed; lists all problems.
    """
    pairs = [one.partition("=") for one in named]
    names = [name for name, _, _ in pairs]
    problems = [
        f"--task {one}: expected NAME=PATH with NAME one of {', '.join(sorted(TASKS))}"
        for one, (name, _, path) in zip(named, pairs, strict=True)
        if name not in TASKS or not path
    ]
    problems += [f"--task {name} is given twice" for name in TASKS if names.count(name) > 1]
    if problems:
        raise ConfigError("these tasks cannot be evaluated", problems)
    loaded = []
    for name, _, path in pairs:
        loaded.append(_loaded(TASKS[name], Path(path), options, problems))
    if problems:
        raise DataError("these tasks cannot be evaluated", problems)
    return loaded


def _loaded(task: Task, path: Path, options: TaskOptions, problems: list[str]) -> LoadedTask:
    if not path.exists():
        problems.append(f"{task.name}: there is no file or folder {path}")
        return LoadedTask(task=task, subjects=())
    found: list[str] = []
    subjects = task.load(path, found)
    wanted = options.num_examples or 0
    found += [
        f"{one.name} has {len(one.examples)} examples, and --shots is {wanted}"
        for one in subjects
        if len(one.examples) < wanted and not found
    ]
    problems += [f"{task.name}: {problem}" for problem in found]
    limit = options.limit
    return LoadedTask(
        task=task,
        subjects=tuple(attrs.evolve(one, questions=one.questions[:limit]) for one in subjects),
    )


@attrs.frozen(kw_only=True)
class _Asked:
    """A question with its prompt; None: it is too long for the model."""

    subject: Subject
    question: Question
    shown: str
    prompt: Prompt | None
    num_examples: int


def task_result(
    loaded: LoadedTask, model: AnsweringModel, options: TaskOptions, progress: Progress
) -> TaskResult:
    """Return the judged questions of a benchmark, in their order.

    A prompt that is too long for the model has fewer examples; without any, a question that is too
    long counts as wrong.
    """
    task = loaded.task
    asked = [
        _asked(task, subject, question, model, options)
        for subject in loaded.subjects
        for question in subject.questions
    ]
    chosen: list[int] = []
    generated: list[int] = []
    for number, one in enumerate(asked):
        if one.prompt is not None:
            (chosen if _by_label(task, one.question, options) else generated).append(number)
    judged = {number: _too_long(one) for number, one in enumerate(asked) if one.prompt is None}
    num_judged = len(judged)
    progress(task.name, num_judged, len(asked))
    for numbers, judge in ((chosen, _by_log_probability), (generated, _by_text)):
        found = judge(task, [asked[number] for number in numbers], model, options)
        for number, result in zip(numbers, found, strict=True):
            judged[number] = result
            num_judged += 1
            progress(task.name, num_judged, len(asked))
    return TaskResult(
        task=task.name,
        form=options.form,
        scored_by=options.scored_by if chosen else ScoredBy.TEXT,
        judged=tuple(judged[number] for number in range(len(asked))),
    )


def _by_label(task: Task, question: Question, options: TaskOptions) -> bool:
    return bool(question.labels) and not task.reasons and options.scored_by is ScoredBy.LOGPROB


def _num_new(task: Task, options: TaskOptions) -> int:
    return options.max_new_tokens or task.max_new_tokens


def _asked(
    task: Task, subject: Subject, question: Question, model: AnsweringModel, options: TaskOptions
) -> _Asked:
    wanted = task.num_examples if options.num_examples is None else options.num_examples
    shown = task.wording.asked(question)
    for count in range(min(wanted, len(subject.examples)), -1, -1):
        prompt = task.wording.prompt(options.form, subject, question, count)
        if model.fits(prompt, _num_new(task, options)):
            return _Asked(
                subject=subject, question=question, shown=shown, prompt=prompt, num_examples=count
            )
    return _Asked(subject=subject, question=question, shown=shown, prompt=None, num_examples=0)


def _too_long(one: _Asked) -> Judged:
    reading = Reading(answer=None, how="the question is longer than the model's longest text")
    return _judged(one, reading, correct=False)


def _by_log_probability(
    task: Task, asked: Sequence[_Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[Judged]:
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
        yield attrs.evolve(_judged(one, reading, correct=correct), log_probabilities=scores)


def _by_text(
    task: Task, asked: Sequence[_Asked], model: AnsweringModel, options: TaskOptions
) -> Iterator[Judged]:
    prompts = [one.prompt for one in asked if one.prompt is not None]
    stop = () if options.form is Form.CHAT else task.stop
    texts = model.answers(prompts, _num_new(task, options), stop)
    for one, text in zip(asked, texts, strict=True):
        reading = task.read(text, one.question)
        found = reading.answer
        correct = found is not None and task.same(found, one.question.expected)
        yield attrs.evolve(_judged(one, reading, correct=correct), text=text)


def _judged(one: _Asked, reading: Reading, *, correct: bool) -> Judged:
    return Judged(
        subject=one.subject.name,
        number=one.question.number,
        question=one.shown,
        prompt=None if one.prompt is None else one.prompt.shown,
        examples=one.num_examples,
        expected=one.question.expected,
        answer=reading.answer,
        correct=correct,
        why=reading.how,
    )
