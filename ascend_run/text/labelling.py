"""Map a rendered conversation to token ids and a training mask. No torch.

The text is encoded in one call, as in inference, and a token belongs to the assistant if it holds a
character of one of its turns. So the result does not depend on how a tokenizer merges across turn
boundaries, or on whether it encodes the start of a text differently.
"""

from __future__ import annotations

from typing import Any

import attrs

from .chat_tokenizer import ChatTokenizer
from .turns import Rendered, Span


@attrs.frozen
class Labelled:
    """Tokens of one conversation, up to the last trained one."""

    ids: list[int]
    trained: list[bool]

    def up_to(self, tokens: int) -> Labelled:
        """Return the first tokens."""
        return Labelled(self.ids[:tokens], self.trained[:tokens])

    def end_of_turn(self, tokens: int) -> int:
        """Return the end of the last trained turn within the first tokens; 0 if none ends there."""
        after = [*self.trained[1:], False]
        ends = (i for i in reversed(range(tokens)) if self.trained[i] and not after[i])
        return next(ends, -1) + 1


def label(rendered: Rendered, encoding: Any, tokenizer: ChatTokenizer) -> Labelled:
    """Mark the assistant's tokens, each turn with the special token that closes it.

    A turn that the template does not close gets the end-of-sequence token.

    Args:
        encoding: The tokenizers.Encoding of the text, without special tokens added.
    """
    ids, offsets = encoding.ids, encoding.offsets
    trained = [False] * len(ids)
    closed_after: set[int] = set()
    for span in rendered.spans:
        first, last, is_closed = _tokens_of(rendered.text, span, ids, offsets, tokenizer)
        trained[first:last] = [True] * (last - first)
        if not is_closed and last > first:
            closed_after.add(last - 1)
    out_ids: list[int] = []
    out_trained: list[bool] = []
    for index, (number, counts) in enumerate(zip(ids, trained, strict=True)):
        out_ids.append(number)
        out_trained.append(counts)
        if index in closed_after:
            out_ids.append(tokenizer.eos_id)
            out_trained.append(True)
    begin = len(out_ids) - len(without_doubled(out_ids, tokenizer.bos_id))
    # No trained token attends to what follows the last one.
    end = max((index + 1 for index, counts in enumerate(out_trained) if counts), default=0)
    return Labelled(out_ids[begin:end], out_trained[begin:end])


def without_doubled(ids: list[int], bos_id: int | None) -> list[int]:
    """Return the ids without begin-of-sequence tokens before the one that is kept."""
    extra = 0
    while bos_id is not None and ids[extra : extra + 2] == [bos_id, bos_id]:
        extra += 1
    return ids[extra:]


def _tokens_of(
    text: str, span: Span, ids: list[int], offsets: list[Span], tokenizer: ChatTokenizer
) -> tuple[int, int, bool]:
    """Return the half-open range of a turn's tokens, and whether a special token ends it."""
    inside = [
        index for index, (begin, end) in enumerate(offsets) if begin < span[1] and end > span[0]
    ]
    if not inside:
        return 0, 0, False
    first, last = inside[0], inside[-1]

    def is_space(index: int) -> bool:
        return text[slice(*offsets[index])].isspace()

    while last > first and is_space(last):
        last -= 1
    if ids[last] in tokenizer.special_ids and ids[last] != tokenizer.bos_id:
        return first, last + 1, True
    following = last + 1
    while following < len(ids) and is_space(following):
        following += 1
    if following < len(ids) and ids[following] == tokenizer.eos_id:
        return first, following + 1, True
    return first, last + 1, False
