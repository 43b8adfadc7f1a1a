"""Runs with and without dropout. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api import AscendRunError

from .questions import Side

HIDDEN: Final = "model.hidden_dropout"
ATTENTION: Final = "model.attention_dropout"
DROPOUT: Final = (HIDDEN, ATTENTION)
_PROBABILITY: Final = 0.2
_CHOICES: Final[Sequence[Mapping[str, float]]] = (
    {HIDDEN: _PROBABILITY, ATTENTION: _PROBABILITY},
    {HIDDEN: _PROBABILITY},
    {ATTENTION: _PROBABILITY},
)


def without_dropout(side: Side) -> Side:
    """Return the same run without dropout."""
    return attrs.evolve(side, values={**side.values, **dict.fromkeys(DROPOUT, 0.0)})


def with_dropout(side: Side) -> Side:
    """Return the same run with as much dropout as its plugins support; with its own if it has any.

    Check ``has_dropout`` if it must have some.
    """
    if has_dropout(side):
        return side
    for choice in _CHOICES:
        dropping = attrs.evolve(side, values={**side.values, **choice})
        try:
            dropping.prepare()
        except AscendRunError:
            continue
        return dropping
    return side


def has_dropout(side: Side) -> bool:
    """Return whether the model of a run has dropout."""
    model = side.prepare().config.model
    return any(model[key.partition(".")[2]] for key in DROPOUT)
