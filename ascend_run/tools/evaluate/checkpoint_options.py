"""What a user says about the checkpoints of a run, as options of the command. Imports no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

if TYPE_CHECKING:
    from .each_checkpoint import EachCheckpoint


@attrs.frozen(kw_only=True)
class CheckpointChoice:
    """As the user gave it."""

    every: int | None
    follow: bool
    name: str | None

    @property
    def is_given(self) -> bool:
        """Whether the checkpoints of a run are to be evaluated, rather than one model."""
        return self.every is not None or self.follow

    def each(self) -> EachCheckpoint:
        """Return which checkpoints are evaluated.

        Raises:
            UsageError: The name cannot be one of a folder.
        """
        from .each_checkpoint import EachCheckpoint

        name = self.name or ""
        if self.name is not None and not re.fullmatch(r"[\w-][\w.-]*", self.name):
            raise click.UsageError(
                f"--name {self.name!r}: expected letters, digits, dots, - and _, as it names a "
                "folder"
            )
        return EachCheckpoint(every=self.every or 1, follow=self.follow, name=name)


_OPTIONS: Final = (
    click.option(
        "--every",
        type=click.IntRange(min=1),
        metavar="N",
        help="Of a run: evaluate each checkpoint whose step is a multiple of N and that has no "
        "scores yet; the report of the run draws them over the steps.",
    ),
    click.option(
        "--follow",
        is_flag=True,
        help="Of a run: the same with new checkpoints, until the run ends; default: every one.",
    ),
    click.option(
        "--name",
        help="With --every or --follow: name of these scores, where a run has those of other data "
        "or options.",
    ),
)


def checkpoint_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``checkpoints``."""
    names = [field.name for field in attrs.fields(CheckpointChoice)]

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        return function(checkpoints=CheckpointChoice(**values), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
