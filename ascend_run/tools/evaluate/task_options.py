"""What a user says about benchmarks, as options of the command. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

if TYPE_CHECKING:
    from .asking import ProgramOptions, TaskOptions
    from .harness.running import HarnessOptions


@attrs.frozen(kw_only=True)
class Asking:
    """How questions are asked, as the user gave it."""

    form: str
    scored_by: str
    shots: int | None
    limit: int | None
    max_new_tokens: int | None
    run_programs: bool
    samples: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    program_timeout: float | None
    lm_eval: tuple[str, ...]
    lm_eval_tasks: Path | None

    def options(self) -> TaskOptions:
        """Return what the tasks take.

        Raises:
            ConfigError: Options of programs cannot be used; lists all.
        """
        from .asking import ScoredBy, TaskOptions
        from .prompts import Form

        return TaskOptions(
            form=Form(self.form),
            scored_by=ScoredBy(self.scored_by),
            num_examples=self.shots,
            limit=self.limit,
            max_new_tokens=self.max_new_tokens,
            programs=self._programs(),
        )

    def harness(self) -> HarnessOptions | None:
        """Return what the tasks of lm-evaluation-harness take; None: there are none.

        Raises:
            ConfigError: Options have no effect.
        """
        from ascend_run.plugin_api import ConfigError

        from .harness.running import HarnessOptions

        if not self.lm_eval:
            if self.lm_eval_tasks is not None:
                raise ConfigError("--lm-eval-tasks has no effect without --lm-eval")
            return None
        names = [name.strip() for given in self.lm_eval for name in given.split(",")]
        return HarnessOptions(
            tasks=tuple(filter(None, names)),
            folder=self.lm_eval_tasks,
            num_examples=self.shots,
            limit=self.limit,
            chat=self.form == "chat",
        )

    def _programs(self) -> ProgramOptions | None:
        from ascend_run.ops.generation.sampling import Sampling, sampling_problems
        from ascend_run.plugin_api import ConfigError

        from .asking import ProgramOptions
        from .sandbox import Limits

        names = ("samples", "temperature", "top_p", "seed", "program_timeout")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        said = ", ".join("--" + name.replace("_", "-") for name in given)
        drawing = ("temperature", "top_p", "seed")
        drawn: dict[str, Any] = {name: given[name] for name in drawing if name in given}
        problems = [
            f"--{name.replace('_', '-')} {drawn[name]}: {expected}"
            for name, expected in sampling_problems(drawn).items()
        ]
        needs_draws = "top_p" in given or "seed" in given or (self.samples or 1) > 1
        if given and not self.run_programs:
            problems.append(f"{said}: no effect without --run-programs")
        elif needs_draws and not self.temperature:
            problems.append(f"{said}: no effect without draws; say --temperature above 0")
        if problems:
            raise ConfigError("programs cannot be run like that", problems)
        if not self.run_programs:
            return None
        return ProgramOptions(
            limits=Limits(seconds=self.program_timeout or Limits().seconds),
            samples=self.samples or 1,
            sampling=Sampling(**drawn) if self.temperature else None,
        )


_OPTIONS: Final = (
    click.option(
        "--task",
        "tasks",
        multiple=True,
        metavar="NAME=PATH",
        help="Benchmark, and its folder or file; may be given several times. One of agieval, bbh, "
        "boolq, ceval, cmmlu, gsm8k, humaneval, mmlu.",
    ),
    click.option(
        "--form",
        type=click.Choice(("direct", "chat", "alternative")),
        default="direct",
        show_default=True,
        help="How questions are asked: as a text to continue, by the model's chat template, or as "
        "a text with an instruction before each question.",
    ),
    click.option(
        "--scored-by",
        type=click.Choice(("logprob", "text")),
        default="logprob",
        show_default=True,
        help="How the answer of a multiple-choice question is found: the label with the largest "
        "log-probability, or the one that the generated text names.",
    ),
    click.option(
        "--shots",
        type=click.IntRange(min=0),
        metavar="N",
        help="Examples before each question; default: those of the benchmark's files, at most as "
        "many as it is known with.",
    ),
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help="First questions of each subject; default: all.",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="Longest generated answer; default: the benchmark's.",
    ),
    click.option(
        "--run-programs",
        is_flag=True,
        help="Allow humaneval to run the programs that the model writes, each in a process of its "
        "own without network, other processes and your files.",
    ),
    click.option(
        "--samples",
        type=click.IntRange(min=1),
        metavar="N",
        help="Programs of each question, for pass@k; default: 1.",
    ),
    click.option(
        "--temperature",
        type=float,
        metavar="T",
        help="Draw the tokens of programs, with logits divided by T; default: 0, the most probable "
        "token follows.",
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        help="Draw of the most probable tokens that have probability P together; default: 1.",
    ),
    click.option("--seed", type=int, metavar="N", help="Seed of the draws; default: 0."),
    click.option(
        "--program-timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Longest run of a program; default: 3.",
    ),
    click.option(
        "--lm-eval",
        multiple=True,
        metavar="NAMES",
        help="Tasks of lm-evaluation-harness, which is to be installed, with commas between them.",
    ),
    click.option(
        "--lm-eval-tasks",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Folder with the files of those tasks; default: those that it has, with data that is "
        "on this machine.",
    ),
)


def task_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets ``tasks``, and the others together as ``asking``."""
    names = [field.name for field in attrs.fields(Asking)]

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        return function(asking=Asking(**values), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
