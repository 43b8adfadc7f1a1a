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
_NOISE: Final[Mapping[str, object]] = {
    "model.moe_input_jitter_eps": None,
    "model.moe_router_force_load_balancing": False,
    "model.moe_sparsemixer_sampling": False,
}
"""Options by which a router draws or goes by a token's place on its rank -> values without."""
_CAPACITY: Final[Mapping[str, object]] = {
    "model.moe_expert_capacity_factor": None,
    "model.moe_pad_expert_input_to_capacity": False,
    "model.moe_token_drop_policy": "probs",
}
"""The same of options by which experts drop tokens of each rank apart: equal on one rank."""
_DRAWS: Final[Mapping[str, object]] = {HIDDEN: 0.0, ATTENTION: 0.0, **_NOISE}
WITHOUT_DRAWS: Final[Mapping[str, object]] = {**_DRAWS, **_CAPACITY}
"""The same of every option that makes a step depend on the layout by design."""
_PROBABILITY: Final = 0.2
_CHOICES: Final[Sequence[Mapping[str, float]]] = (
    {HIDDEN: _PROBABILITY, ATTENTION: _PROBABILITY},
    {HIDDEN: _PROBABILITY},
    {ATTENTION: _PROBABILITY},
)


def without_dropout(side: Side, *, one_rank: bool = False) -> Side:
    """Return the same run without dropout, and with routers that go by the logits alone.

    Args:
        one_rank: All runs that are compared have one rank, so that experts may drop tokens.
    """
    values = _DRAWS if one_rank else WITHOUT_DRAWS
    return attrs.evolve(side, values={**side.values, **values})


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


def has_noise(side: Side, *, one_rank: bool) -> bool:
    """Return whether the routers of a run do not go by the logits alone."""
    model = side.prepare().config.model
    drops = bool(model.moe_expert_capacity_factor) and not one_rank
    return drops or any(model[name.removeprefix("model.")] for name in _NOISE)


def probabilities(side: Side) -> dict[str, float]:
    """Return the dropout probabilities of a run's model, by the kind of mask.

    On other platforms than the CPU a kernel may draw the masks of attention itself, unseen.
    """
    config = side.prepare().config
    found = {HIDDEN_MASK: config.model.hidden_dropout}
    if config.platform == DEFAULT_PLATFORM:
        found[ATTENTION_MASK] = config.model.attention_dropout
    return found
