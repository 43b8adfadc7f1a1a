"""Beam searches in continuous batches: a beam is a sequence of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from torch import Tensor

from .beams import Beam, Beams, BeamSearch, Extended
from .engine import Finish, Request
from .key_value_cache import CacheFull, KeyValueCache
from .step import Chunk, Step

# R rows of a step's logits, V vocabulary


def pages_of(request: Request, search: BeamSearch, page_size: int) -> int:
    """Return the most pages that a search has at a time: the full ones of its prompt, which all
    beams share, and those that each beam has of its own."""
    shared = len(request.prompt) // page_size
    return shared + search.num_beams * (-(-request.num_stored // page_size) - shared)


@attrs.frozen
class Found:
    """The end of a search."""

    number: int
    ids: tuple[int, ...]  #: New ids of the best text.
    score: float
    finish: Finish


@attrs.define(eq=False)
class _Search:
    """A search that has pages."""

    request: Request
    beams: Beams
    sequences: list[int]
    """Of each beam; until the prompt is computed, of all together."""
    num_stored: int = 0

    @property
    def has_begun(self) -> bool:
        return self.num_stored >= len(self.request.prompt)


class BeamEngine:
    """Every step has a token of each beam, and chunks of prompts.

    Args:
        forward: Step -> logits [R, V].
        chunk_tokens: Prompt tokens of a search in a step.
    """

    def __init__(
        self,
        forward: Callable[[Step], Tensor],
        cache: KeyValueCache,
        search: BeamSearch,
        *,
        chunk_tokens: int = 512,
    ) -> None:
        self._forward, self._cache, self._how = forward, cache, search
        self._chunk_tokens = chunk_tokens
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, _Search] = {}
        self._num_submitted = self._num_sequences = 0

    def submit(self, request: Request) -> int:
        """Queue a request, whose sampling is not looked at, and return its number.

        Raises:
            CacheFull: It needs more than the whole cache, so it could never be served.
        """
        needed = pages_of(request, self._how, self._cache.page_size)
        if needed > self._cache.num_pages:
            raise CacheFull(
                f"{self._how.num_beams} beams of {len(request.prompt)} tokens and "
                f"{request.max_new_tokens} new ones need {needed} pages, and the cache has "
                f"{self._cache.num_pages}"
            )
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._waiting[number] = request
        return number

    @property
    def is_idle(self) -> bool:
        """Whether no search waits or runs."""
        return not self._waiting and not self._running

    def step(self) -> list[Found]:
        """Run one forward and return the searches that ended."""
        self._admit()
        chunks = {number: self._chunks(search) for number, search in self._running.items()}
        if not (together := [chunk for each in chunks.values() for chunk in each]):
            return []
        logits_RV = self._forward(Step.of(together))
        found, row = [], 0
        for number, each in chunks.items():
            search = self._running[number]
            search.num_stored += len(each[0].ids)
            count = sum(chunk.num_logits for chunk in each)
            if count and (end := self._extend(number, logits_RV[row : row + count])) is not None:
                found.append(end)
            row += count
        return found

    def _admit(self) -> None:
        """Begin waiting searches, first come first served, that have pages until they end."""
        page_size = self._cache.page_size
        for number, request in [*self._waiting.items()]:
            running = [one.request for one in self._running.values()]
            needed = sum(pages_of(one, self._how, page_size) for one in [request, *running])
            if needed > self._cache.num_pages:
                return
            sequence = self._new_sequence()
            self._cache.reserve(sequence, request.num_stored)
            beams = Beams(self._how, request.prompt, request.max_new_tokens, request.end_ids)
            self._running[number] = _Search(request, beams, [sequence])
            del self._waiting[number]

    def _chunks(self, search: _Search) -> list[Chunk]:
        start, prompt = search.num_stored, search.request.prompt
        if search.has_begun:
            last = [beam.ids[-1] for beam in search.beams.running]
            return [
                Chunk(sequence=sequence, start=start, ids=[token], num_logits=1)
                for sequence, token in zip(search.sequences, last, strict=True)
            ]
        ids = prompt[start : start + self._chunk_tokens]
        is_last = int(start + len(ids) == len(prompt))
        chunk = Chunk(
            sequence=search.sequences[0],
            start=start,
            ids=ids,
            num_logits=is_last,
            length=len(prompt),
        )
        return [chunk]

    def _extend(self, number: int, logits_RV: Tensor) -> Found | None:
        search = self._running[number]
        if len(logits_RV) < self._how.num_beams:  # of the prompt, with which all beams begin
            logits_RV = logits_RV.expand(self._how.num_beams, -1)
        if extended := search.beams.extend(logits_RV):
            search.sequences = self._arranged(search.sequences, extended)
            return None
        for sequence in search.sequences:
            self._cache.release(sequence)
        del self._running[number]
        return _found(number, search)

    def _arranged(self, sequences: list[int], extended: Iterable[Extended]) -> list[int]:
        """Return the sequences of the next beams. The first beam that extends another one takes its
        sequence, and the rest of them fork it."""
        parents = [one.parent % len(sequences) for one in extended]
        for index, sequence in enumerate(sequences):
            if index not in parents:
                self._cache.release(sequence)
        arranged, taken = [], set[int]()
        for parent in parents:
            sequence = sequences[parent]
            if parent in taken:
                sequence = self._new_sequence()
                self._cache.fork(sequences[parent], sequence)
            taken.add(parent)
            arranged.append(sequence)
        return arranged

    def _new_sequence(self) -> int:
        self._num_sequences += 1
        return self._num_sequences


def _found(number: int, search: _Search) -> Found:
    best: Beam = search.beams.complete[0]
    ended = best.ids[-1] in search.request.end_ids
    return Found(number, best.ids, best.score, Finish.STOP if ended else Finish.LENGTH)
