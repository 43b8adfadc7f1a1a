"""Ask a model the questions of a benchmark, and judge its answers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from ascend_run.plugin_api import ConfigError, DataError

from .asking import ScoredBy, TaskOptions
from .judges import Asked, by_log_probability, by_program, by_text, num_new
from .progress import Progress
from .prompts import Question, Subject
from .protocol import AnsweringModel
from .readings import Reading
from .results import Judged, TaskResult
from .sandbox import Limits, SandboxError, run_program
from .tasks import TASKS
from .tasks.task import Task


@attrs.frozen(kw_only=True)
class LoadedTask:
    """A benchmark with its questions."""

    task: Task
    subjects: tuple[Subject, ...]


def loaded_tasks(named: Sequence[str], options: TaskOptions) -> list[LoadedTask]:
    """Read benchmarks, each named as ``NAME=PATH``.

    Raises:
        ConfigError: A name is unknown, or comes twice; or programs cannot be run; lists all
            problems, those of files too.
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
    running = [name for name in TASKS if name in names and TASKS[name].program is not None]
    problems += _program_problems(running, options)
    of_files: list[str] = []
    loaded = [
        _loaded(TASKS[name], Path(path), options, of_files)
        for name, _, path in dict.fromkeys(pairs)
        if name in TASKS and path
    ]
    if problems:
        raise ConfigError("these tasks cannot be evaluated", problems + of_files)
    if of_files:
        raise DataError("these tasks cannot be evaluated", of_files)
    return loaded


def _program_problems(running: Sequence[str], options: TaskOptions) -> list[str]:
    """Return why the programs of tasks cannot be run."""
    if options.programs is None:
        return [
            f"--task {name} runs programs that the model writes; allow it with --run-programs: "
            "each runs in a process of its own, without network, other processes and your files"
            for name in running
        ]
    if not running:
        return ["--run-programs has no effect: no task has programs; name one, such as humaneval"]
    try:
        outcome = run_program("", Limits(seconds=30.0))
    except (SandboxError, OSError) as error:
        why = str(error)
    else:
        why = "" if outcome.passed else outcome.how
    if not why:
        return []
    names = " and ".join(running)
    problem = (
        f"programs of {names} cannot be confined on this machine ({why}), and are never run "
        "without; allow user namespaces (Linux: sysctl user.max_user_namespaces, and "
        "kernel.apparmor_restrict_unprivileged_userns=0 where it is there; Docker: "
        f"--security-opt seccomp=unconfined), or leave {names} out"
    )
    return [problem]


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


def task_result(
    loaded: LoadedTask, model: AnsweringModel, options: TaskOptions, progress: Progress
) -> TaskResult:
    """Return the judged questions of a benchmark, in their order.

    A prompt that is too long for the model has fewer examples; without any, a question that is too
    long counts as wrong.

    Raises:
        ConfigError: A program could not be confined.
    """
    task = loaded.task
    asked = [
        _asked(task, subject, question, model, options)
        for subject in loaded.subjects
        for question in subject.questions
    ]
    programs = options.programs if task.program is not None else None
    chosen: list[int] = []
    generated: list[int] = []
    for number, one in enumerate(asked):
        if one.prompt is not None and _by_label(task, one.question, options):
            chosen.append(number)
        elif one.prompt is not None:
            generated += [number] * (1 if programs is None else programs.samples)
    judged = {number: [_too_long(one)] for number, one in enumerate(asked) if one.prompt is None}
    num_judged = len(judged)
    total = num_judged + len(chosen) + len(generated)
    progress(task.name, num_judged, total)
    by_generation = by_text if programs is None else by_program
    for numbers, judge in ((chosen, by_log_probability), (generated, by_generation)):
        found = judge(task, [asked[number] for number in numbers], model, options)
        for number, result in zip(numbers, found, strict=True):
            samples = judged.setdefault(number, [])
            samples.append(attrs.evolve(result, sample=len(samples) + 1))
            num_judged += 1
            progress(task.name, num_judged, total)
    return TaskResult(
        task=task.name,
        form=options.form,
        scored_by=_scored_by(task, options, any_label=bool(chosen)),
        judged=tuple(one for number in range(len(asked)) for one in judged[number]),
        programs=None if programs is None else programs.record(),
    )


def _scored_by(task: Task, options: TaskOptions, *, any_label: bool) -> str:
    if task.program is not None:
        return "tests"
    return options.scored_by if any_label else ScoredBy.TEXT


def _by_label(task: Task, question: Question, options: TaskOptions) -> bool:
    one_label = bool(question.labels) and not question.several
    return one_label and not task.reasons and options.scored_by is ScoredBy.LOGPROB


def _asked(
    task: Task, subject: Subject, question: Question, model: AnsweringModel, options: TaskOptions
) -> Asked:
    wanted = task.num_examples if options.num_examples is None else options.num_examples
    shown = task.wording.asked(question)
    for count in range(min(wanted, len(subject.examples)), -1, -1):
        prompt = task.wording.prompt(options.form, subject, question, count)
        if model.fits(prompt, num_new(task, options)):
            return Asked(
                subject=subject, question=question, shown=shown, prompt=prompt, num_examples=count
            )
    return Asked(subject=subject, question=question, shown=shown, prompt=None, num_examples=0)


def _too_long(one: Asked) -> Judged:
    reading = Reading(answer=None, how="the question is longer than the model's longest text")
    return one.judged(reading, correct=False)
