"""Continuous batches: sequences join and leave a batch between any two steps.

Source: Yu et al. 2022, Orca, OSDI 22, section 3.2; chunks of prompts: arXiv:2403.02310.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import attrs
from torch import Tensor

from .key_value_cache import CacheFull, KeyValueCache
from .sampling import Choice, Sampler, Sampling, choices
from .step import Chunk, Step


@attrs.frozen(kw_only=True)
class Request:
    """A prompt, and how far to continue it."""

    prompt: tuple[int, ...] = attrs.field(validator=attrs.validators.min_len(1))
    max_new_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    end_ids: frozenset[int] = frozenset()
    """Ids after which nothing follows; the id itself is emitted."""
    sampling: Sampling = attrs.field(factory=Sampling)
    is_kept: bool = False
    """Whether its tokens stay in the cache when it ends, for ``Engine.resume``."""

    @property
    def num_stored(self) -> int:
        """Tokens in the cache at the end: the last new one is not fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


def cache_tokens(requests: Sequence[Request], max_sequences: int, page_size: int = 16) -> int:
    """Return the tokens of the longest requests that can run together, in whole pages."""
    longest = sorted((request.num_stored for request in requests), reverse=True)
    return sum(-(-tokens // page_size) * page_size for tokens in longest[:max_sequences])


class Finish(StrEnum):
    """Why a sequence ended, in the words of OpenAI's API."""

    STOP = "stop"  #: An end id.
    LENGTH = "length"  #: ``max_new_tokens``.


@attrs.frozen
class Emitted:
    """One new token."""

    sequence: int
    token: int
    finish: Finish | None
    logprob: float | None = None
    """By the model's own distribution; None: not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with theirs, largest first."""


@attrs.define(eq=False)
class _Running:
    """A sequence that has pages."""

    request: Request
    ids: list[int]
    sampler: Sampler
    num_new: int = 0
    num_stored: int = 0
    num_cached: int = 0
    """Tokens of the prompt that were in the cache before."""
    length: int = 0
    """Tokens of its text when the last of them were computed, or of its prompt."""


class Engine:
    """Every step has a token of each running sequence, and chunks of prompts.

    Args:
        forward: Step -> logits [R, V].
        chunk_tokens: Prompt tokens of a step.
        max_sequences: Running at a time; others wait in order.
        restarts_above: A text that gets longer than this is recomputed from its first token, since
            its RoPE scaling has other angles from there on.
        have_same_keys: Whether tokens that begin texts of two lengths have the same keys.
    """

    def __init__(
        self,
        forward: Callable[[Step], Tensor],
        cache: KeyValueCache,
        *,
        chunk_tokens: int = 512,
        max_sequences: int = 16,
        restarts_above: int | None = None,
        have_same_keys: Callable[[int, int], bool] = lambda length, other: True,
    ) -> None:
        self._forward, self._cache = forward, cache
        self._chunk_tokens, self._max_sequences = chunk_tokens, max_sequences
        self._restarts_above, self._have_same_keys = restarts_above, have_same_keys
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, _Running] = {}
        self._kept: dict[int, _Running] = {}
        """Sequences that have ended and have their pages still; the oldest first."""
        self._num_submitted = 0

    def submit(self, request: Request) -> int:
        """Queue a request and return the number of its sequence.

        Raises:
            CacheFull: It needs more than the whole cache, so it could never be served.
        """
        self._require_capacity(request)
        sequence, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._waiting[sequence] = request
        return sequence

    def resume(self, sequence: int, request: Request) -> None:
        """Queue the next request of a sequence that has ended. Tokens that its prompt begins with
        and that are in the cache still are not recomputed.

        Raises:
            CacheFull: It needs more than the whole cache.
        """
        assert sequence < self._num_submitted, f"no sequence {sequence} was submitted"
        assert sequence not in self._waiting, f"sequence {sequence} has a request that waits"
        assert sequence not in self._running, f"sequence {sequence} has not ended"
        self._require_capacity(request)
        self._waiting[sequence] = request

    def num_cached(self, sequence: int) -> int:
        """Return how many tokens of the prompt were in the cache, of a sequence that runs or is
        kept."""
        return (self._running.get(sequence) or self._kept[sequence]).num_cached

    def end(self, sequence: int) -> None:
        """End a sequence, if it has not ended: its pages are free at once, or kept."""
        self._waiting.pop(sequence, None)
        if (ended := self._running.pop(sequence, None)) is None:
            return
        if ended.request.is_kept:
            self._kept[sequence] = ended
        else:
            self._cache.release(sequence)

    def cancel(self, sequence: int) -> None:
        """End a sequence, if it has not ended: its pages are free at once, kept ones too."""
        self.end(sequence)
        if self._kept.pop(sequence, None) is not None:
            self._cache.release(sequence)

    def step(self) -> list[Emitted]:
        """Run one forward and return the new tokens; none if nothing is left to do."""
        self._admit()
        if not (chunks := self._chunks()):
            return []
        logits_RV = self._forward(Step.of(chunks))
        for chunk in chunks:
            running = self._running[chunk.sequence]
            running.num_stored, running.length = chunk.start + len(chunk.ids), chunk.length
        complete = [chunk.sequence for chunk in chunks if chunk.num_logits]
        found = [self._running[sequence] for sequence in complete]
        chosen = choices(logits_RV, [one.sampler for one in found], [one.ids for one in found])
        return [self._emit(*pair) for pair in zip(complete, chosen, strict=True)]

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return not self._waiting and not self._running

    def _admit(self) -> None:
        """Give pages to waiting sequences, first come first served."""
        while self._waiting and len(self._running) < self._max_sequences:
            sequence, request = next(iter(self._waiting.items()))
            try:
                num_cached = self._reserve(sequence, request)
            except CacheFull:
                if self._take_kept(sequence):
                    continue
                assert self._running, "nothing runs, and pages are missing: some were not released"
                return
            self._running[sequence] = _Running(
                request,
                list(request.prompt),
                Sampler(request.sampling),
                num_stored=num_cached,
                num_cached=num_cached,
                length=len(request.prompt),
            )
            del self._waiting[sequence]

    def _reserve(self, sequence: int, request: Request) -> int:
        """Reserve the pages of a request, and return how many tokens of its prompt they have.

        Raises:
            CacheFull: There are too few free pages.
        """
        if (kept := self._kept.get(sequence)) is None:
            self._cache.reserve(sequence, request.num_stored)
            return 0
        self._cache.grow(sequence, request.num_stored)
        del self._kept[sequence]
        num_cached = 0
        if self._have_same_keys(kept.length, len(request.prompt)):
            # The last token is computed, for its logits.
            num_cached = _num_common(kept.ids[: kept.num_stored], request.prompt[:-1])
        self._cache.forget(sequence, num_cached)
        return num_cached

    def _take_kept(self, sequence: int) -> bool:
        """Free the pages that another sequence keeps, the oldest first, or those of this one.

        Returns:
            Whether there were any.
        """
        others = [other for other in self._kept if other != sequence]
        if not (candidates := others or [*self._kept]):
            return False
        del self._kept[candidates[0]]
        self._cache.release(candidates[0])
        return True

    def _chunks(self) -> list[Chunk]:
        left = self._chunk_tokens
        chunks = []
        for sequence, running in self._running.items():
            start = running.num_stored
            missing = len(running.ids) - start
            is_next = running.num_new > 0 and missing == 1
            count = missing if is_next else min(missing, left)
            if not count:
                continue
            left -= 0 if is_next else count
            ids = running.ids[start : start + count]
            last = int(count == missing)
            chunk = Chunk(
                sequence=sequence,
                start=start,
                ids=ids,
                num_logits=last,
                length=len(running.ids),
            )
            chunks.append(chunk)
        return chunks

    def _emit(self, sequence: int, choice: Choice) -> Emitted:
        running, token = self._running[sequence], choice.token
        running.ids.append(token)
        running.num_new += 1
        finish = None
        if token in running.request.end_ids:
            finish = Finish.STOP
        elif running.num_new == running.request.max_new_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self.end(sequence)
        elif len(running.ids) - 1 == self._restarts_above:
            running.num_stored = 0
            self._cache.forget(sequence)
        return Emitted(sequence, token, finish, choice.logprob, choice.top)

    def _require_capacity(self, request: Request) -> None:
        """
        Raises:
            CacheFull: It needs more than the whole cache.
        """
        capacity = self._cache.num_pages * self._cache.page_size
        if request.num_stored > capacity:
            raise CacheFull(
                f"{len(request.prompt)} tokens and {request.max_new_tokens} new ones do not fit "
                f"into a cache of {capacity}"
            )


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ids), len(others)))
