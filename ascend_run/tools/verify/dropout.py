"""Runs with and without dropout. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ascend_run.plugin_api import AscendRunError
from ascend_run.tools.verify.capture.mask_record import ATTENTION as ATTENTION_MASK
from ascend_run.tools.verify.capture.mask_record import HIDDEN as HIDDEN_MASK
from ascend_run.types.config import DEFAULT_PLATFORM

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
    return bool(model.hidden_dropout or model.attention_dropout)


def probabilities(side: Side) -> dict[str, float]:
    """Return the dropout probabilities of a run's model, by the kind of mask.

    On other platforms than the CPU a kernel may draw the masks of attention itself, unseen.
    """
    config = side.prepare().config
    found = {HIDDEN_MASK: config.model.hidden_dropout}
    if config.platform == DEFAULT_PLATFORM:
        found[ATTENTION_MASK] = config.model.attention_dropout
    return found
