"""Label the two answers to a prompt, and check that the pair can be used. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from .encoder import Encoder, LeftOut, Result
from .labelling import Labelled
from .samples import Conversation, Preference
from .templates import TemplateRefusal

SIDES: Final = ("chosen", "rejected")
EQUAL_ANSWERS: Final = "equal answers"
Pair: TypeAlias = tuple[Labelled, Labelled]
"""The prompt with the chosen and with the rejected answer; only the answers are trained."""


def label_pairs(
    batch: Sequence[Preference], encoder: Encoder, *, drops_equal: bool = False
) -> list[Result[Pair]]:
    """Return the labelled ids of each pair; a refusal if it cannot be used, see ``checked``."""
    chosen, rejected = (
        encoder.label([_conversation(sample, side) for sample in batch], only_last=True)
        for side in SIDES
    )
    return [_both(*sides, drops_equal=drops_equal) for sides in zip(chosen, rejected, strict=True)]


def checked(pair: Pair, *, drops_equal: bool = False) -> Result[Pair]:
    """Return a pair; a refusal if an answer has no token to train on, or both are equal.

    Args:
        drops_equal: Leave pairs with equal answers out, in place of a refusal.
    """
    lacking = [side for side, labelled in zip(SIDES, pair, strict=True) if not has_labels(labelled)]
    if lacking:
        return TemplateRefusal(
            f"its {' and its '.join(lacking)} answer has no token to train on; write an answer, "
            "or remove the row"
        )
    if are_equal(pair):
        if drops_equal:
            return LeftOut(EQUAL_ANSWERS)
        return TemplateRefusal(
            "its chosen and rejected answers are the same tokens; correct one, or remove the row"
        )
    return pair


def has_labels(labelled: Labelled) -> bool:
    """Whether a trained token can be predicted; the first token is never a label."""
    return any(labelled.trained[1:])


def are_equal(pair: Pair) -> bool:
    """Whether the answers are the same tokens; their texts may differ."""
    chosen, rejected = (
        [number for number, trained in zip(each.ids, each.trained, strict=True) if trained]
        for each in pair
    )
    return chosen == rejected


def _conversation(sample: Preference, side: str) -> Conversation:
    answer = sample.chosen if side == "chosen" else sample.rejected
    return Conversation(
        messages=(*sample.prompt, answer), tools=sample.tools, documents=sample.documents
    )


def _both(
    chosen: Result[Labelled], rejected: Result[Labelled], *, drops_equal: bool
) -> Result[Pair]:
    for result in (chosen, rejected):
        if isinstance(result, LeftOut | TemplateRefusal):
            return result
    assert isinstance(chosen, Labelled)
    assert isinstance(rejected, Labelled)
    return checked((chosen, rejected), drops_equal=drops_equal)
