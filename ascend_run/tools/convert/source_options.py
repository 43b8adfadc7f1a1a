"""What a user says about a stored model, as options of each command that reads one.

Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import click


@attrs.frozen(kw_only=True)
class SourceOptions:
    """What a user says about the source."""

    step: int | None = None
    family: str | None = None
    config: Path | None = None
    """A run's config.toml, or a Hugging Face config.json."""
    tp_extend_ep: bool = False
    """Of files without args: tensor-parallel ranks have experts of their own."""
    weights: str | None = None
    """Of a run: the state of its optimizer to take as the weights."""
    first_copy: bool = False
    """Where the copies of a replicated tensor differ, take the first rank's."""
    from_args: bool = False
    """Of Megatron's formats: take the config from the args, though a config.toml lies beside."""
    adapter: Path | None = None
    """A folder in PEFT's format, to merge."""
    base: Path | None = None
    """Hugging Face folder of the weights of a run's adapters; None: its ``model.hf_path``."""


_FIELDS: Final = {
    "step": "step",
    "family": "family",
    "config": "config",
    "weights": "weights",
    "read_moe_tp_extend_ep": "tp_extend_ep",
    "first_copy": "first_copy",
    "adapter": "adapter",
    "base": "base",
}
"""Parameter of the command -> field of ``SourceOptions``."""

_OPTIONS: Final = (
    click.option(
        "--step",
        type=click.IntRange(min=0),
        help="Step or iteration of the checkpoint; default: the newest.",
    ),
    click.option(
        "--family",
        metavar="NAME",
        help="Model family; default: from the run's config or the folder's config.json.",
    ),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Config of the model: a run's config.toml, or a Hugging Face config.json; default: "
        "beside the checkpoint.",
    ),
    click.option(
        "--weights",
        metavar="STATE",
        help="State of a run's optimizer to take as the weights, such as an average, ema; "
        "default: the weights.",
    ),
    click.option(
        "--read-moe-tp-extend-ep",
        is_flag=True,
        help="The checkpoint has whole experts on tensor-parallel ranks; default: as its args say.",
    ),
    click.option(
        "--first-copy",
        is_flag=True,
        help="Where copies of a replicated tensor differ, take the first rank's; default: an "
        "error.",
    ),
    click.option(
        "--adapter",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Adapter in PEFT's format to merge into the weights.",
    ),
    click.option(
        "--base",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Hugging Face folder of the weights of a run's adapters; default: its model.hf_path.",
    ),
)


def source_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the function gets them together, as ``source_options``."""

    @functools.wraps(function)
    def with_options(**given: Any) -> int:
        fields = {field: given.pop(name) for name, field in _FIELDS.items()}
        return function(source_options=SourceOptions(**fields), **given)

    decorated: Callable[..., int] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
