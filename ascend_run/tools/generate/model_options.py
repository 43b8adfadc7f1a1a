"""How a model is built to generate, as options of each command that does. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import attrs
import click


@attrs.frozen(kw_only=True)
class ModelOptions:
    """What a user says about the model beside where it lies."""

    rope_length: int | None = None
    """Every text has the rotary angles of a text of this length. Unit: tokens."""


_FIELDS: Final = tuple(attribute.name for attribute in attrs.fields(ModelOptions))
_OPTIONS: Final = (
    click.option(
        "--rope-length",
        type=click.IntRange(min=1),
        metavar="N",
        help="For RoPE scalings by the length of a text (dynamic, longrope): give all texts the "
        "angles of one of N tokens, which is then the longest; default: each text its own.",
    ),
)


def model_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``model_options``."""

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        fields = {name: given.pop(name) for name in _FIELDS}
        return function(model_options=ModelOptions(**fields), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
