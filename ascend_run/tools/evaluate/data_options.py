"""What a user says about texts whose perplexity is measured, as options of the command.

Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

if TYPE_CHECKING:
    from .perplexity import WindowOptions
    from .token_streams import DataOptions


@attrs.frozen(kw_only=True)
class DataChoice:
    """How files are read and predicted, as the user gave it."""

    window: int | None
    stride: int | None
    format: str
    json_key: str
    append_eod: bool

    def options(self) -> DataOptions:
        """Return how files are read."""
        from .token_streams import DataOptions

        return DataOptions(format=self.format, key=self.json_key, append_eod=self.append_eod)

    def windows(self) -> WindowOptions:
        """Return from how many tokens each is predicted."""
        from .perplexity import WindowOptions

        return WindowOptions(window=self.window, stride=self.stride)


_OPTIONS: Final = (
    click.option(
        "--window",
        type=click.IntRange(min=1),
        metavar="N",
        help="Most tokens before a predicted one; default: the model's longest text.",
    ),
    click.option(
        "--stride",
        type=click.IntRange(min=1),
        metavar="N",
        help="Predicted tokens of each window but the first; default: the window.",
    ),
    click.option(
        "--format",
        type=click.Choice(("auto", "jsonl", "records", "text", "python")),
        default="auto",
        show_default=True,
        help="Format of the files of text; auto: by suffix.",
    ),
    click.option(
        "--json-key", default="text", show_default=True, help="Key of the text in a JSON record."
    ),
    click.option(
        "--append-eod/--no-append-eod",
        default=True,
        show_default=True,
        help="Append the end-of-document token to every document.",
    ),
)


def data_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``reading``."""
    names = [field.name for field in attrs.fields(DataChoice)]

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        return function(reading=DataChoice(**values), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
