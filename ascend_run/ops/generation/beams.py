"""The choice of beams by their log-probabilities.

Which beams go on, which texts are complete, and when a search ends: as transformers' ``generate``
(``_beam_search`` of 5.x), whose formulas these are.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs
import torch
from torch import Tensor

from .sampling import penalised

# B beams, V vocabulary, C candidates

_NEVER_CHOSEN: Final = -1.0e9
"""Added to the scores of what may not be chosen."""

EarlyStopping = Literal["false", "true", "never"]


@attrs.frozen(kw_only=True)
class BeamSearch:
    """How texts are searched for."""

    num_beams: int = attrs.field(validator=attrs.validators.ge(1))
    length_penalty: float = 1.0
    """A complete text is scored by its log-probability, divided by its new tokens to this power."""
    early_stopping: EarlyStopping = "false"
    """When a search ends: ``true``, with as many complete texts as beams; ``false``, when the best
    beam, by its length so far, is worse than those; ``never``, when it cannot become better."""
    repetition_penalty: float = 1.0


@attrs.frozen
class Beam:
    """A text that is not complete, or is."""

    ids: tuple[int, ...]  #: New ids.
    score: float
    is_complete: bool = False


@attrs.frozen
class Extended:
    """A beam of the next step."""

    parent: int  #: Index of the beam that it extends.
    token: int


class Beams:
    """The state of one search.

    Args:
        prompt: For the repetition penalty.
        end_ids: Ids that complete a text.
    """

    def __init__(
        self,
        search: BeamSearch,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        self._search, self._prompt = search, prompt
        self._max_new_tokens, self._end_ids = max_new_tokens, end_ids
        # All beams are the prompt: the first one alone may be extended.
        empty = [Beam((), _NEVER_CHOSEN)] * search.num_beams
        self.running = [Beam((), 0.0), *empty[1:]]
        self.complete = empty  #: Best first; those that are not ``is_complete`` are places left.
        self._can_improve = True

    def extend(self, logits_BV: Tensor) -> list[Extended]:
        """Choose the beams of the next step; none if the search has ended."""
        tops, new, ends = self._candidates(logits_BV)
        self._complete(tops, new, ends)
        left = tops + ends * _NEVER_CHOSEN
        chosen = left.topk(self._search.num_beams).indices.tolist()
        extended = [Extended(*new[index]) for index in chosen]
        self.running = [
            Beam((*self.running[one.parent].ids, one.token), float(left[index]))
            for one, index in zip(extended, chosen, strict=True)
        ]
        return [] if self._has_ended(bool(ends.all())) else extended

    def _candidates(self, logits_BV: Tensor) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
        """Return scores [C] of the best continuations, their beams and tokens, and which of them
        are complete [C]."""
        logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        logprobs_BV = logits_BV.log_softmax(-1)
        if (penalty := self._search.repetition_penalty) != 1:
            logprobs_BV = torch.stack(
                [
                    penalised(row_V, [*self._prompt, *beam.ids], penalty)
                    for row_V, beam in zip(logprobs_BV, self.running, strict=True)
                ]
            )
        scores_B = logprobs_BV.new_tensor([beam.score for beam in self.running])
        # So many that with every end of a text among them, there is a next step of each beam.
        count = max(2, 1 + len(self._end_ids)) * self._search.num_beams
        tops = (logprobs_BV + scores_B[:, None]).flatten().topk(count)
        vocab_size = logprobs_BV.shape[-1]
        new = [divmod(index, vocab_size) for index in tops.indices.tolist()]
        is_last = len(self.running[0].ids) + 1 == self._max_new_tokens
        ends = torch.tensor([is_last or token in self._end_ids for _, token in new])
        return tops.values, new, ends

    def _complete(self, tops: Tensor, new: list[tuple[int, int]], ends: Tensor) -> None:
        """Take complete texts among the best candidates, as many as there are beams."""
        search, num_new = self._search, len(self.running[0].ids) + 1
        scores = tops / num_new**search.length_penalty
        is_full = all(beam.is_complete for beam in self.complete)
        if (is_full and search.early_stopping == "true") or not self._can_improve:
            return
        found = [
            Beam((*self.running[parent].ids, token), float(scores[index]), is_complete=True)
            for index, (parent, token) in enumerate(new[: search.num_beams])
            if ends[index]
        ]
        ranked = sorted([*self.complete, *found], key=lambda beam: -beam.score)
        self.complete = ranked[: search.num_beams]

    def _has_ended(self, all_end: bool) -> bool:
        search, num_new = self._search, len(self.running[0].ids)
        longest = search.early_stopping == "never" and search.length_penalty > 0
        length = self._max_new_tokens if longest else num_new
        best = self.running[0].score / length**search.length_penalty
        worst = min(beam.score for beam in self.complete)
        self._can_improve &= any(
            best > (worst if beam.is_complete else _NEVER_CHOSEN) for beam in self.complete
        )
        is_full = all(beam.is_complete for beam in self.complete)
        return not self._can_improve or (is_full and search.early_stopping == "true") or all_end
