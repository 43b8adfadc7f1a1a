"""Log-probabilities of the last tokens of rows of ids, many rows in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.tools.generate.model import GenerationModel

# R wanted rows of a step, V vocabulary

_CHUNK_TOKENS: Final = 512
_MAX_ROWS: Final = 64
"""Rows of a step."""
_PAGE: Final = 16


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """Ids of which the last ones are to be scored, each after all that precede it."""

    ids: Sequence[int]  #: At least two.
    num_scored: int  #: At most all but the first.

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.ids) - 1


def row_scores(
    model: GenerationModel, rows: Sequence[Row], chunk_tokens: int = _CHUNK_TOKENS
) -> Iterator[Tensor]:
    """Yield for each row, in order, the log-probabilities of its last tokens: float64 [num_scored].

    A step computes chunks of several rows, and no more logits than are wanted.

    Args:
        chunk_tokens: Tokens of a step.
    """
    longest = max((row.num_inputs for row in rows), default=0)
    cache = model.with_cache(_cache_tokens(longest, chunk_tokens))
    batch = _Batch()
    found: dict[int, list[Tensor]] = {}

    def computed() -> Iterator[Tensor]:
        for number, scores in batch.run(model):
            found.setdefault(number, []).append(scores)
            if number in batch.ended:
                cache.release(number)
                yield torch.cat(found.pop(number))

    for number, row in enumerate(rows):
        cache.reserve(number, row.num_inputs)
        start = 0
        while start < row.num_inputs:
            end = min(row.num_inputs, start + chunk_tokens - batch.num_tokens)
            batch.add(number, row, start, end)
            start = end
            if batch.num_tokens == chunk_tokens or len(batch.chunks) == _MAX_ROWS:
                yield from computed()
                batch = _Batch()
    if batch.chunks:
        yield from computed()


def _cache_tokens(longest: int, chunk_tokens: int) -> int:
    """Return a capacity in which pages of a row are adjacent wherever an unfinished one lies."""
    whole = -(-longest // _PAGE) * _PAGE
    others = chunk_tokens + _MAX_ROWS * _PAGE
    return 3 * whole + 2 * others


@attrs.define
class _Batch:
    """Chunks of rows that one step computes."""

    chunks: list[Chunk] = attrs.field(factory=list)
    targets: list[int] = attrs.field(factory=list)
    """The tokens after those whose logits are wanted."""
    ended: set[int] = attrs.field(factory=set)
    """Rows whose last chunk is here."""
    num_tokens: int = 0

    def add(self, number: int, row: Row, start: int, end: int) -> None:
        """Add the tokens from ``start`` to ``end`` of a row."""
        num_logits = max(0, end - max(start, row.num_inputs - row.num_scored))
        ids = [int(token) for token in row.ids[start : end + 1]]
        chunk = Chunk(sequence=number, start=start, ids=ids[:-1], num_logits=num_logits)
        self.chunks.append(chunk)
        self.targets += ids[len(ids) - num_logits :]
        self.num_tokens += end - start
        if end == row.num_inputs:
            self.ended.add(number)

    def run(self, model: GenerationModel) -> Iterator[tuple[int, Tensor]]:
        """Yield each chunk's row and its log-probabilities."""
        logits_RV = model.logits(Step.of(self.chunks))
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        targets_R1 = torch.tensor(self.targets, dtype=torch.int64)[:, None]
        of_targets_R = logits_RV.gather(1, targets_R1)[:, 0].double()
        scores_R = of_targets_R - logits_RV.logsumexp(-1).double()
        counts = [chunk.num_logits for chunk in self.chunks]
        for chunk, scores in zip(self.chunks, scores_R.split(counts), strict=True):
            yield chunk.sequence, scores
