"""Options of a beam search. Imports no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from .sampling_options import SamplingOptions

if TYPE_CHECKING:
    from ascend_run.ops.generation.beams import BeamSearch

_MOST_BEAMS: Final = 64


@attrs.frozen(kw_only=True)
class BeamOptions:
    """What a user says about beams; None: nothing."""

    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: str | None = None

    def problems(self, sampling: SamplingOptions) -> Iterator[str]:
        """Say what is out of range or has no effect, also of the other options."""
        if not 1 <= self.num_beams <= _MOST_BEAMS:
            yield f"--num-beams {self.num_beams}: expected a number from 1 to {_MOST_BEAMS}"
        if self.length_penalty is not None and not math.isfinite(self.length_penalty):
            yield f"--length-penalty {self.length_penalty}: expected a finite number"
        if self.num_beams == 1:
            given = {
                "--length-penalty": self.length_penalty,
                "--early-stopping": self.early_stopping,
            }
            if without := [name for name, value in given.items() if value is not None]:
                yield f"{', '.join(without)}: no effect with one beam; say --num-beams"
            return
        others = {
            "--temperature, --top-k, --top-p and --min-p": sampling.draws,
            "--stop": sampling.stop,
            "--logprobs": sampling.logprobs is not None,
        }
        if found := [name for name, is_given in others.items() if is_given]:
            yield f"{'; '.join(found)}: not with --num-beams"

    def search(self, sampling: SamplingOptions) -> BeamSearch | None:
        """Return the search; None: there is one beam."""
        from ascend_run.ops.generation.beams import BeamSearch

        if self.num_beams == 1:
            return None
        given = {**attrs.asdict(self), "repetition_penalty": sampling.repetition_penalty}
        return BeamSearch(**{name: value for name, value in given.items() if value is not None})


_OPTIONS: Final = (
    click.option(
        "--num-beams",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Search for the most probable answer with N beams.",
    ),
    click.option(
        "--length-penalty",
        type=float,
        metavar="X",
        help="Of beams: log-probabilities of answers are divided by their tokens to the power X; "
        "default: 1.",
    ),
    click.option(
        "--early-stopping",
        type=click.Choice(("false", "true", "never")),
        help="Of beams: end with N answers (true), when no beam is better by its length so far "
        "(false), or when none can become better (never); default: false.",
    ),
)


def beam_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``beam_options``."""
    names = [field.name for field in attrs.fields(BeamOptions)]

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        return function(beam_options=BeamOptions(**values), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
