"""Write the settings of PEFT's ``adapter_config.json``. Torch-free.

PEFT selects modules by the ends of their names, and takes ranks and alphas from the first pattern
that matches. Source: https://github.com/huggingface/peft, LoraConfig.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import attrs

from .peft_settings import SCORES

_OF_A_STACKED_WEIGHT = 3
"""Words of a name that select a stacked weight of experts: ``mlp.experts.down_proj``."""


@attrs.frozen(kw_only=True)
class Adapted:
    """A linear layer, or a stacked weight of experts, that has an adapter."""

    name: str
    """In Hugging Face's model, or in every layer of it."""
    rank: int
    alpha: float
    is_stacked: bool = False


def written_settings(
    adapted: Collection[Adapted],
    others: Collection[str],
    *,
    rank: int,
    alpha: float,
    num_labels: int | None = None,
    more: Mapping[str, object],
) -> dict[str, object]:
    """Return the content of ``adapter_config.json``, from which PEFT builds these adapters.

    Args:
        others: Names of linear layers that have none.
        rank: Of adapters that no pattern names; alike ``alpha``.
        num_labels: Of the model's score head; None: it has an output layer.
        more: What adapters of any names have in common.
    """
    stacked = {_end(one.name, _OF_A_STACKED_WEIGHT) for one in adapted if one.is_stacked}
    return dict(
        sorted(
            {
                "alpha_pattern": _pattern(adapted, {one.name: one.alpha for one in adapted}, alpha),
                "bias": "none",
                "inference_mode": True,
                "init_lora_weights": True,
                "lora_alpha": _whole(alpha),
                "peft_type": "LORA",
                "r": rank,
                "rank_pattern": _pattern(adapted, {one.name: one.rank for one in adapted}, rank),
                "target_modules": _targets(
                    {one.name for one in adapted if not one.is_stacked}, others
                ),
                **({"target_parameters": sorted(stacked)} if stacked else {}),
                "task_type": SCORES if num_labels else "CAUSAL_LM",
                **more,
            }.items()
        )
    )


def _pattern(
    adapted: Collection[Adapted], values: Mapping[str, float], default: float
) -> dict[str, float]:
    """Return the pattern that gives every name its value: the shortest ends of names that others
    with another value do not have, so that the order of the pattern does not matter.

    Args:
        values: Name -> rank or alpha.
        default: Names that have it are left out.
    """
    by_end: dict[str, set[float]] = defaultdict(set)
    for name, value in values.items():
        for end in _ends(name):
            by_end[end].add(value)
    found = {}
    for one in adapted:
        if (value := values[one.name]) != default:
            least = _OF_A_STACKED_WEIGHT if one.is_stacked else 1
            ends = (end for end in _ends(one.name, least) if by_end[end] == {value})
            found[next(ends, one.name)] = _whole(value)
    return dict(sorted(found.items()))


def _targets(modules: Collection[str], others: Collection[str]) -> list[str]:
    """Return the shortest ends of the modules' names that no other linear layer has."""
    foreign = {end for name in others for end in _ends(name)}
    return sorted(
        {next((end for end in _ends(name) if end not in foreign), name) for name in modules}
    )


def _ends(name: str, least: int = 1) -> Iterator[str]:
    """Yield the ends of a name, from that of ``least`` words to the name itself."""
    for words in range(least, name.count(".") + 2):
        yield _end(name, words)


def _end(name: str, words: int) -> str:
    return ".".join(name.split(".")[-words:])


def _whole(value: float) -> float:
    """Return an integer for a whole number, as PEFT writes it."""
    return int(value) if value == int(value) else value
