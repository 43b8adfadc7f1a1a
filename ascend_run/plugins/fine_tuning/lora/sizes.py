"""Ranks and scales of the adapters of linears' parts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ascend_run.ops.linear.low_rank import of_part, scale_of

from .targets import ALL, adapted, hint, known_targets, linear_of, names_of

if TYPE_CHECKING:
    from ascend_run.plugin_api import RunConfig

    from . import LoraOptions


def rank_of_part(part: str, options: LoraOptions) -> int:
    """Return the rank of a part's adapter."""
    return of_part(options.rank_pattern, linear_of(part), part, options.rank)


def alpha_of_part(part: str, options: LoraOptions) -> float:
    """Return the alpha of a part's adapter."""
    return of_part(options.alpha_pattern, linear_of(part), part, options.alpha)


def scale_of_part(part: str, options: LoraOptions) -> float:
    """Return the factor on the output of a part's adapter."""
    rank, alpha = rank_of_part(part, options), alpha_of_part(part, options)
    return scale_of(alpha, rank, rslora=options.rslora)


def pattern_problems(config: RunConfig, options: LoraOptions) -> Iterator[str]:
    """Yield the names and values of the patterns that no adapter can have."""
    known = [name for name in known_targets(config) if name != ALL]
    parts = adapted(options.target_modules, config)
    named = {name for part in parts for name in names_of(part)}
    patterns: Mapping[str, tuple[Mapping[str, float], str]] = {
        "rank_pattern": (options.rank_pattern, "a rank of at least 1"),
        "alpha_pattern": (options.alpha_pattern, "a number above 0"),
    }
    for option, (pattern, wanted) in patterns.items():
        for name, value in pattern.items():
            if name not in known:
                yield (
                    f"plugins.lora.{option} names {name!r}{hint(name, known)}; expected some of "
                    f"{', '.join(known)}"
                )
            elif name not in named:
                yield (
                    f"plugins.lora.{option} names {name!r}, which has no adapter; add it to "
                    "plugins.lora.target_modules, or leave it out"
                )
            elif value <= 0:
                yield f"plugins.lora.{option} has {name}={value}; expected {wanted}"
