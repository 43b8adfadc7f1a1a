"""Map a rendered conversation to token ids and a training mask. No torch.

The text is encoded in one call, as in inference, and a token belongs to the assistant if it holds a
character of one of its turns. So the result does not depend on how a tokenizer merges across turn
boundaries, or on whether it encodes the start of a text differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .chat_tokenizer import ChatTokenizer
from .skeletons import Span
from .tokens import Tokens
from .turns import Rendered


@attrs.frozen
class Labelled:
    """Tokens of one conversation, up to the last trained one."""

    ids: list[int]
    trained: Sequence[float]
    """Weight of each token's loss: 0 if it is not trained, 1 in a conversation without weights."""

    def up_to(self, tokens: int) -> Labelled:
        """Return the first tokens."""
        return Labelled(self.ids[:tokens], self.trained[:tokens])

    def end_of_turn(self, tokens: int) -> int:
        """Return the end of the last trained turn within the first tokens; 0 if none ends there."""
        after = [*self.trained[1:], 0.0]
        ends = (i for i in reversed(range(tokens)) if self.trained[i] and not after[i])
        return next(ends, -1) + 1


def label(rendered: Rendered, tokens: Tokens, tokenizer: ChatTokenizer) -> Labelled:
    """Weigh the assistant's tokens, each turn with the special token that closes it.

    A turn that the template does not close gets the end-of-sequence token.

    Args:
        tokens: Those of the text, without special tokens added.
    """
    ids, trained = tokens.ids, [rendered.weight_of_prompts] * len(tokens.ids)
    left_open: dict[int, float] = {}
    weights = rendered.weights or (1.0,) * len(rendered.spans)
    for span, weight in zip(rendered.spans, weights, strict=True):
        first, last, is_closed = _tokens_of(tokens, span, tokenizer)
        trained[first:last] = [weight] * (last - first)
        if not is_closed and last > first:
            left_open[last] = weight
    for end in sorted(left_open, reverse=True):
        ids.insert(end, tokenizer.eos_id)
        trained.insert(end, left_open[end])
    begin = len(ids) - len(without_doubled(ids, tokenizer.bos_id))
    # No trained token attends to what follows the last one.
    end = next((index + 1 for index in reversed(range(len(trained))) if trained[index]), 0)
    return Labelled(ids[begin:end], trained[begin:end])


def without_doubled(ids: list[int], bos_id: int | None) -> list[int]:
    """Return the ids without begin-of-sequence tokens before the one that is kept."""
    extra = 0
    while bos_id is not None and ids[extra : extra + 2] == [bos_id, bos_id]:
        extra += 1
    return ids[extra:]


def _tokens_of(tokens: Tokens, span: Span, tokenizer: ChatTokenizer) -> tuple[int, int, bool]:
    """Return the half-open range of a turn's tokens, and whether a special token ends it."""
    inside, ids = tokens.inside(span), tokens.ids
    if not inside:
        return 0, 0, False
    first, last = inside[0], inside[-1]
    while last > first and tokens.is_space(last):
        last -= 1
    if ids[last] in tokenizer.special_ids and ids[last] != tokenizer.bos_id:
        return first, last + 1, True
    following = last + 1
    while following < len(ids) and tokens.is_space(following):
        following += 1
    if following < len(ids) and ids[following] == tokenizer.eos_id:
        return first, following + 1, True
    return first, last + 1, False
