"""How much each turn of a conversation counts in the loss. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from .samples import Conversation, Message
from .templates import TemplateRefusal
from .turns import Rendered, says_something

WEIGHT: Final = "weight"
"""Key of a message: the factor of the losses of its tokens."""


def weight_problem(message: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the weight of a message; None if nothing is, or it has none."""
    if message.get(WEIGHT) is None:
        return None
    weight = message[WEIGHT]
    if message["role"] != "assistant":
        return (
            f"has the weight {weight!r} and the role {message['role']!r}; weights are of the "
            "assistant's turns, so remove it"
        )
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        return (
            f"has the weight {weight!r}; expected a number of at least 0: 0 leaves the turn out "
            "of the loss, and 1 counts it as without a weight"
        )
    return None


def without_weights(conversation: Conversation) -> Conversation:
    """Return a conversation as its template receives it."""
    if not any(WEIGHT in message for message in conversation.messages):
        return conversation
    plain = (
        {key: value for key, value in message.items() if key != WEIGHT}
        for message in conversation.messages
    )
    return attrs.evolve(conversation, messages=tuple(plain))


def weighted(
    rendered: Rendered,
    messages: Sequence[Message],
    *,
    only_last: bool = False,
    with_prompts: bool = False,
) -> Rendered:
    """Return a rendered conversation with the weights of its turns.

    Args:
        only_last: Train the last turn of the assistant only.
        with_prompts: Train what is between the turns too, with the weight 1.

    Raises:
        TemplateRefusal: Turns have different weights, and are not distinguished in the text.
    """
    rendered = attrs.evolve(rendered, weight_of_prompts=float(with_prompts))
    turns = [message for message in messages if message["role"] == "assistant"]
    if only_last:
        # An empty answer has no text: the last one would be that of an earlier answer.
        spans = rendered.spans[-1:] if turns and says_something(turns[-1]) else ()
        return attrs.evolve(rendered, spans=spans, weights=_weights(turns[-1:])[: len(spans)])
    if all(weight == 1.0 for weight in _weights(turns)):
        return rendered
    said = [turn for turn in turns if says_something(turn)]
    for of_text in (said, turns):  # a template may close an empty turn, which is then trained
        if len(of_text) == len(rendered.spans):
            return attrs.evolve(rendered, weights=_weights(of_text))
    raise TemplateRefusal(
        f"it marks {len(rendered.spans)} texts as generated for {len(turns)} turns of the "
        f"assistant, so their weights {', '.join(map(str, _weights(turns)))} cannot be assigned; "
        "leave the weights out, or use another template"
    )


def _weights(turns: Sequence[Message]) -> tuple[float, ...]:
    return tuple(1.0 if turn.get(WEIGHT) is None else float(turn[WEIGHT]) for turn in turns)
