"""How a model is built to generate, as options of each command that does. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import click


@attrs.frozen(kw_only=True)
class ModelOptions:
    """What a user says about the model beside where it lies."""

    rope_length: int | None = None
    """Every text has the rotary angles of a text of this length. Unit: tokens."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    nproc: int | None = None
    """Ranks in all; None: as many as the sizes need."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nproc or self.pp * max(self.tp, self.ep)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return max(1, self.world_size // (self.tp * self.pp))

    @property
    def words(self) -> str:
        """Return the sizes as the command line has them, without those of one rank."""
        sizes = {"--tp": self.tp, "--pp": self.pp, "--ep": self.ep, "--nproc": self.nproc or 1}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)

    def layout(self, *, experts: bool) -> list[str]:
        """Return the sizes as overrides of a config.

        Experts on tensor-parallel ranks need sequence parallelism.
        """
        sizes = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
        }
        found = [f"parallel.{name}={size}" for name, size in sizes.items()]
        return [*found, "parallel.sequence_parallel=true"] if experts and self.tp > 1 else found


template_option: Final = click.option(
    "--template",
    metavar="NAME|FILE",
    help="Chat template: a known name, or a .jinja file; default: the tokenizer's own.",
)

tokenizer_option: Final = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Tokenizer file, or its folder; default: in MODEL, then the data.tokenizer of the run.",
)
dtype_option: Final = click.option(
    "--dtype",
    type=click.Choice(("fp32", "bf16", "fp64")),
    help="Compute in this; default: fp32, or fp64 of such weights.",
)
rope_length_option: Final = click.option(
    "--rope-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="For RoPE scalings by the length of a text (dynamic, longrope): give all texts the "
    "angles of one of N tokens, which is then the longest; default: each text its own.",
)

_FIELDS: Final = tuple(attribute.name for attribute in attrs.fields(ModelOptions))
_OPTIONS: Final = (
    rope_length_option,
    click.option(
        "--tp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Tensor-parallel ranks: each has a share of the heads and widths.",
    ),
    click.option(
        "--pp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Pipeline stages: each has a share of the layers.",
    ),
    click.option(
        "--ep",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Expert-parallel ranks: each has a share of the experts.",
    ),
    click.option(
        "--nproc",
        type=click.IntRange(min=1),
        metavar="N",
        help="Ranks that are started on this machine; more than the sizes need are data-parallel "
        "and share the prompts; default: as many as --tp, --pp and --ep need.",
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
