"""Log-probabilities of the last tokens of rows of ids, many rows in one forward.

What rows that follow each other have in common at their begin, such as a prompt with several
answers, is computed once: the rest continues from copies of its pages in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.tools.generate.model import GenerationModel

from .row_trees import PAGE, Node, Row, Tree, trees

__all__ = ["Row", "Scores", "row_scores"]

# R wanted rows of a step, K scored ids of a step, V vocabulary

_CHUNK_TOKENS: Final = 512
_MAX_CHUNKS: Final = 64
"""Of a step."""


@attrs.frozen(eq=False)
class Scores:
    """Of the last ids of a row."""

    log_probabilities: Tensor  #: float64 [num_scored].
    greedy: bool  #: Whether each is the most probable one, the first of equal ones.


def row_scores(
    model: GenerationModel, rows: Sequence[Row], chunk_tokens: int = _CHUNK_TOKENS
) -> Iterator[Scores]:
    """Yield for each row, in order, the scores of its last ids.

    A step computes chunks of several rows, and no more logits than are wanted.

    Args:
        chunk_tokens: Tokens of a step.
    """
    longest = max((row.num_inputs for row in rows), default=0)
    whole = -(-longest // PAGE)
    most = whole + -(-chunk_tokens // PAGE) + _MAX_CHUNKS
    # Angles of some RoPE scalings depend on the length of the text, also those of its begin.
    share = model.lengths.restarts_above is None
    num_pages = 2 * (most + whole)
    cache = model.with_cache(num_pages * PAGE)
    scoring = _Scoring(cache, trees(rows, most, share=share), num_pages)
    following = 0
    while chunks := scoring.chunks(chunk_tokens):
        scoring.take(chunks, model.logits(Step.of([one.chunk for one in chunks])))
        while following in scoring.complete:
            yield scoring.complete.pop(following)
            following += 1


@attrs.define(eq=False)
class _Open:
    """A node to compute."""

    node: Node
    tree: Tree
    parent: _Open | None = None
    sequence: int | None = None
    """None: it has no pages yet."""
    num_computed: int = 0
    """Up to here, from the begin of the text."""
    num_waiting: int = 0
    """Children that are to continue from its pages."""


@attrs.frozen(eq=False)
class _Part:
    """A chunk of a node."""

    of: _Open
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.chunk.start + len(self.chunk.ids)


class _Scoring:
    """Which chunk is next, and what was found.

    Trees are begun while all of their pages fit into the cache; within, children come before other
    nodes.
    """

    def __init__(self, cache: KeyValueCache, reader: Iterator[Tree], num_pages: int) -> None:
        self._cache, self._reader, self._free = cache, reader, num_pages
        self._next = next(reader, None)
        self._stack: list[_Open] = []
        self._num_sequences = 0
        self._missing: dict[Tree, int] = {}
        """Rows that are not complete."""
        self._found: dict[int, list[tuple[Tensor, bool]]] = {}
        self.complete: dict[int, Scores] = {}

    def chunks(self, num_tokens: int) -> list[_Part]:
        """Return what a step of so many tokens computes; nothing if nothing is left."""
        parts: list[_Part] = []
        while num_tokens and len(parts) < _MAX_CHUNKS and self._begin():
            one = self._stack.pop()
            if one.sequence is None:
                self._reserve(one)
            assert one.sequence is not None
            start, node = one.num_computed, one.node
            one.num_computed = end = min(node.end, start + num_tokens)
            num_logits = max(0, end - max(start, node.end - node.num_logits))
            ids = [int(number) for number in node.ids[start - node.start : end - node.start]]
            chunk = Chunk(sequence=one.sequence, start=start, ids=ids, num_logits=num_logits)
            parts.append(_Part(one, chunk))
            num_tokens -= len(ids)
            if end < node.end:  # the step is full
                self._stack.append(one)
        return parts

    def take(self, parts: Sequence[_Part], logits_RV: Tensor) -> None:
        """Score the ids after the inputs of a step."""
        places: list[int] = []
        targets: list[int] = []
        owners: list[tuple[int, int]] = []
        first = 0
        for part in parts:
            begin = part.end - part.chunk.num_logits
            for number, row in part.of.node.rows:
                low, high = max(begin, row.first), part.end
                if low < high:
                    places += range(first + low - begin, first + high - begin)
                    targets += (int(one) for one in row.ids[low + 1 : high + 1])
                    owners.append((number, high - low))
            first += part.chunk.num_logits
        if owners:
            scores_K, greedy_K = _scored(logits_RV, torch.tensor(places), torch.tensor(targets))
            counts = [count for _, count in owners]
            each = zip(owners, scores_K.split(counts), greedy_K.split(counts), strict=True)
            for (number, _), scores, greedy in each:
                self._found.setdefault(number, []).append((scores, bool(greedy.all())))
        for part in reversed(parts):
            if part.end == part.of.node.end:
                self._end(part.of)

    def _begin(self) -> bool:
        """Whether there is a node to compute; begins the next tree if need be."""
        if not self._stack and self._next is not None and self._next.num_pages <= self._free:
            tree, self._next = self._next, next(self._reader, None)
            self._free -= tree.num_pages
            self._missing[tree] = len(tree.root.rows)
            self._stack.append(_Open(tree.root, tree))
        return bool(self._stack)

    def _reserve(self, one: _Open) -> None:
        one.sequence, self._num_sequences = self._num_sequences, self._num_sequences + 1
        parent = one.parent
        if parent is None:
            self._cache.reserve(one.sequence, one.node.end)
            return
        assert parent.sequence is not None
        self._cache.fork(parent.sequence, one.sequence, one.node.end)
        one.num_computed = one.node.start
        parent.num_waiting -= 1
        if not parent.num_waiting:
            self._cache.release(parent.sequence)

    def _end(self, one: _Open) -> None:
        """Let the children follow, and complete the rows that end here."""
        node, tree = one.node, one.tree
        one.num_waiting = len(node.children)
        self._stack += [_Open(child, tree, one) for child in reversed(node.children)]
        if not node.children:
            assert one.sequence is not None
            self._cache.release(one.sequence)
        for number, row in node.rows:
            if row.num_inputs == node.end:
                scores, greedy = zip(*self._found.pop(number), strict=True)
                self.complete[number] = Scores(torch.cat(scores), all(greedy))
                self._missing[tree] -= 1
        if not self._missing[tree]:
            self._free += tree.num_pages
            del self._missing[tree]


def _scored(logits_RV: Tensor, places_K: Tensor, targets_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of ids, float64 [K], and whether each is the most probable."""
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    of_targets_K = logits_RV[places_K, targets_K].double()
    scores_K = of_targets_K - logits_RV.logsumexp(-1).double()[places_K]
    return scores_K, logits_RV.argmax(-1)[places_K] == targets_K
