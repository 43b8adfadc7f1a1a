"""How tokens are chosen, as options of each command that generates. Imports no torch."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

if TYPE_CHECKING:
    from ascend_run.ops.generation.sampling import Sampling

_DRAWING: Final = ("temperature", "top_k", "top_p", "min_p")
"""Each of these makes a command draw its tokens."""


@attrs.frozen(kw_only=True)
class SamplingOptions:
    """What a user says about the choice of tokens; None: nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the most probable one follows."""
        return self.temperature != 0 and any(getattr(self, name) is not None for name in _DRAWING)

    def problems(self) -> Iterator[str]:
        """Say what is out of range or has no effect."""
        from ascend_run.ops.generation.sampling import sampling_problems

        given = self._given()
        for name, expected in sampling_problems(given).items():
            yield f"{_option(name)} {given[name]}: {expected}"
        if "" in self.stop:
            yield "--stop '': expected at least one character"
        without = [name for name in ("seed", *_DRAWING[1:]) if name in given]
        if without and not self.draws:
            options = ", ".join(map(_option, without))
            yield f"{options}: no effect without draws; say --temperature above 0"

    def sampling(self) -> Sampling:
        """Return what the requests say; without ``--seed`` its seed is a new one."""
        from ascend_run.ops.generation.sampling import Sampling

        given = {"temperature": float(self.draws), "seed": secrets.randbits(32), **self._given()}
        return Sampling(**given)

    def _given(self) -> dict[str, Any]:
        values = attrs.asdict(self)
        del values["stop"]
        return {name: value for name, value in values.items() if value is not None}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


_OPTIONS: Final = (
    click.option(
        "--temperature",
        type=float,
        metavar="T",
        help="Draw tokens, with logits divided by T; default: 1 if another option draws, else the "
        "most probable token follows, as with 0.",
    ),
    click.option(
        "--top-k", type=int, metavar="K", help="Draw of the K most probable tokens; 0: of all."
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        help="Draw of the most probable tokens that have probability P together.",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        help="Draw of tokens with at least P times the largest probability.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Above 1, tokens of the prompt and the answer so far are less probable.",
    ),
    click.option(
        "--seed", type=int, metavar="N", help="Seed of the draws; default: a new one, on stderr."
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="End an answer before this text; may be given several times.",
    ),
    click.option(
        "--logprobs",
        type=int,
        metavar="N",
        help="With --json: log-probabilities of the new tokens, and of the N most probable ones.",
    ),
)


def sampling_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``sampling_options``."""
    names = [field.name for field in attrs.fields(SamplingOptions)]

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        return function(sampling_options=SamplingOptions(**values), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
