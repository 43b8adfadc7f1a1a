"""Runs with and without dropout. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

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
_FACTOR: Final = "model.moe_expert_capacity_factor"
_NEARLY_ALL: Final = 1 - 1e-6
"""Of the factor that pads every expert to all tokens, which is refused; rounded up, it is all."""
_DRAWS: Final[Mapping[str, object]] = {HIDDEN: 0.0, ATTENTION: 0.0, **_NOISE}
_PROBABILITY: Final = 0.2
_CHOICES: Final[Sequence[Mapping[str, float]]] = (
    {HIDDEN: _PROBABILITY, ATTENTION: _PROBABILITY},
    {HIDDEN: _PROBABILITY},
    {ATTENTION: _PROBABILITY},
)


def without_draws(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the options under which a step does not depend on the layout: without what is drawn,
    and with experts that drop no token of any rank. Padded ones stay padded, to all tokens.

    Args:
        values: Config keys, ``model.name``, and values of the run; those of Megatron's default may
            be left out.
    """
    if values.get("model.moe_pad_expert_input_to_capacity"):
        all_tokens = values["model.num_moe_experts"] / values.get("model.moe_router_topk", 2)
        return {**_DRAWS, _FACTOR: all_tokens * _NEARLY_ALL}
    return {**_DRAWS, _FACTOR: None, "model.moe_token_drop_policy": "probs"}


def without_dropout(candidate: Side, *, one_layout: bool) -> Callable[[Side], Side]:
    """Return a function from a run to the same without dropout, and with routers that go by the
    logits alone.

    Args:
        candidate: The run to compare, whose model the others have.
        one_layout: It is not compared with another layout of several ranks. On one rank, experts
            may then drop tokens.
    """
    options = _DRAWS
    if candidate.world_size > 1 or not one_layout:
        model = candidate.prepare().config.model
        options = without_draws({f"model.{name}": value for name, value in model.items()})

    def undrawn(side: Side) -> Side:
        return attrs.evolve(side, values={**side.values, **options})

    return undrawn


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
