"""Options of ``ascend-run convert`` for targets in Megatron's formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

_SIZE: Final = click.IntRange(min=1)


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Comma-separated numbers from 0."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of numbers such as 7,8,8,9", param, ctx)
        return tuple(map(int, parts))


_LAYOUT: Final = (
    click.option("--tp", type=_SIZE, default=1, help="Tensor-parallel size of the target."),
    click.option("--pp", type=_SIZE, default=1, help="Pipeline-parallel size."),
    click.option("--vpp", type=_SIZE, default=1, help="Chunks of layers per pipeline stage."),
    click.option("--ep", type=_SIZE, default=1, help="Expert-parallel size."),
    click.option("--expert-tp", type=_SIZE, help="Tensor-parallel size of experts; default: --tp."),
    click.option(
        "--moe-tp-extend-ep",
        is_flag=True,
        help="Whole experts on tensor-parallel ranks (MindSpeed).",
    ),
    click.option(
        "--schedules-method",
        type=click.Choice(("dualpipev",)),
        help="Two chunks of layers per stage in the order of a V (MindSpeed).",
    ),
    click.option(
        "--num-layer-list", type=_Numbers(), default=(), help="Layers of each stage: 7,8,8,9."
    ),
    click.option(
        "--noop-layers",
        type=_Numbers(),
        default=(),
        help="Layer slots that stay empty: 0,31 (MindSpeed).",
    ),
)
_MODULES: Final = (
    click.option(
        "--transformer-impl",
        type=click.Choice(("local", "transformer_engine")),
        default="local",
        help="Whose modules Megatron builds: its own or Transformer Engine's.",
    ),
    click.option(
        "--moe-grouped-gemm",
        is_flag=True,
        help="All experts of a rank in one module; default: expert by expert.",
    ),
    click.option(
        "--moe-use-legacy-grouped-gemm",
        is_flag=True,
        help="weight1 and weight2 also with --transformer-impl transformer_engine.",
    ),
    click.option(
        "--mla-qkv-concat",
        is_flag=True,
        help="Down projections of latent attention in one linear_qkv (MindSpeed).",
    ),
    click.option(
        "--mla-mm-split",
        is_flag=True,
        help="And its up projections in two parts each (MindSpeed).",
    ),
    click.option(
        "--make-vocab-size-divisible-by",
        type=_SIZE,
        metavar="N",
        help="Pad the vocabulary to a multiple of N times --tp; default: the model's.",
    ),
)


def megatron_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options of the layout and of the modules."""
    for option in reversed((*_LAYOUT, *_MODULES)):
        function = option(function)
    return function
