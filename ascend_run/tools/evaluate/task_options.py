"""What a user says about benchmarks, as options of the command. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

if TYPE_CHECKING:
    from .judging import TaskOptions


@attrs.frozen(kw_only=True)
class Asking:
    """How questions are asked, as the user gave it."""

    form: str
    scored_by: str
    shots: int | None
    limit: int | None
    max_new_tokens: int | None

    def options(self) -> TaskOptions:
        """Return what the tasks take."""
        from .judging import ScoredBy, TaskOptions
        from .prompts import Form

        return TaskOptions(
            form=Form(self.form),
            scored_by=ScoredBy(self.scored_by),
            num_examples=self.shots,
            limit=self.limit,
            max_new_tokens=self.max_new_tokens,
        )


_OPTIONS: Final = (
    click.option(
        "--task",
        "tasks",
        multiple=True,
        metavar="NAME=PATH",
        help="Benchmark, and its folder or file; may be given several times. One of agieval, bbh, "
        "boolq, ceval, cmmlu, gsm8k, mmlu.",
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
